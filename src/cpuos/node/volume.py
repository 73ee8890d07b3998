"""The volume of disks and images is watched. When something else has filled it the ballast is given back and the
guests stand still: a disk that finds no block for what its guest wrote would have an I/O error, and a root's layer
would take its sandbox with it. When there is room again the ballast is made anew and they go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from cpuos.errors import CapacityExceeded, CpuosError
from cpuos.node.journal import Record, Stage
from cpuos.node.ledger import Ledger
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.storage.ballast import Ballast
from cpuos.node.storage.room import free_bytes, volume_bytes
from cpuos.types.node import VolumeFacts

__all__ = ["Tell", "Volume", "VolumeWatch"]

log = structlog.get_logger("cpuos.node")

LOOK_S = 0.05
# What stands still is told again, for a gateway that was restarted; and a ballast that lacks is tried again.
REPEAT_S = 2.0
# Under so much free, or this share of a small volume, it is full.
_MARK_BYTES, _MARK_SHARE = 64 << 20, 100


class Tell(Protocol):
    def __call__(self, sandbox_id: str, *, halted: bool) -> None: ...


class Volume:
    """What verbs ask before they begin."""

    def __init__(self, folder: Path, *, ballast: Ballast) -> None:
        self.folder = folder
        self.ballast = ballast
        self.full = False
        self.times_full = 0

    @property
    def mark_bytes(self) -> int:
        return min(_MARK_BYTES, volume_bytes(self.folder) // _MARK_SHARE)

    def require(self, what: str) -> None:
        """Raise where nothing may be begun that writes."""
        if self.full:
            raise CapacityExceeded(
                what,
                "the node's data volume is full: sandboxes stand still until there is room on it",
                hint="cpuos df, or free some room on the node",
            )

    def facts(self) -> VolumeFacts:
        return VolumeFacts(
            full=self.full,
            times_full=self.times_full,
            total_bytes=volume_bytes(self.folder),
            free_bytes=free_bytes(self.folder),
            ballast_bytes=self.ballast.held_bytes,
        )


class VolumeWatch:
    """Looks often, at the price of one statvfs; runs between `start` and `close`."""

    def __init__(
        self,
        volume: Volume,
        *,
        ledger: Ledger,
        runtimes: RuntimeTable,
        tell: Tell = lambda sandbox_id, halted: None,
        look_s: float = LOOK_S,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._volume = volume
        self._ledger = ledger
        self._runtimes = runtimes
        self._tell = tell
        self._look_s = look_s
        self._free = free
        self._halted: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Sandboxes that stand still stay so: the next daemon looks anew."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        if not self._is_low():  # the last daemon may have left some standing
            await self._go_on([record.id for record in self._running()])
        repeat_at = 0.0
        loop = asyncio.get_running_loop()
        while True:
            again = loop.time() >= repeat_at
            try:
                await self.look(again=again)
            except Exception:
                log.exception("volume not looked at")
            if again:
                repeat_at = loop.time() + REPEAT_S
            await asyncio.sleep(self._look_s)

    async def look(self, *, again: bool = False) -> None:
        """One look. `again`: what takes longer too."""
        volume = self._volume
        if not volume.full:
            if self._is_low():
                await self._fill()
            elif again:
                await asyncio.to_thread(volume.ballast.take, leave=2 * volume.mark_bytes)
            return
        await self._halt_all(again=again)
        leave = 2 * volume.mark_bytes
        if self._free(volume.folder) >= leave and await asyncio.to_thread(volume.ballast.take, leave=leave):
            await self._drain()

    def _is_low(self) -> bool:
        return self._free(self._volume.folder) < self._volume.mark_bytes

    async def _fill(self) -> None:
        self._volume.full = True
        self._volume.times_full += 1
        self._volume.ballast.give()
        log.error("the data volume is full: sandboxes stand still until there is room", folder=str(self._volume.folder))
        await self._halt_all()

    async def _drain(self) -> None:
        log.warning("the data volume has room again: sandboxes go on", folder=str(self._volume.folder))
        halted, self._halted = self._halted, set()
        await self._go_on(halted)
        self._volume.full = False  # last: whoever reads it finds them going on

    async def _halt_all(self, *, again: bool = False) -> None:
        running = self._running()
        self._halted &= {record.id for record in self._ledger.all()}
        for record in running:
            if record.id in self._halted and not again:
                continue
            runtime = self._runtimes.find(record.request.runtime)
            try:
                if runtime is not None:
                    await runtime.halt(record.id)
                    self._halted.add(record.id)
                    self._tell(record.id, halted=True)
            except (CpuosError, OSError) as error:
                log.warning("sandbox not halted", sandbox=record.id, why=str(error))

    async def _go_on(self, sandbox_ids: set[str] | list[str]) -> None:
        for sandbox_id in sandbox_ids:
            record = self._ledger.find(sandbox_id)
            runtime = self._runtimes.find(record.request.runtime) if record is not None else None
            try:
                if runtime is not None:
                    await runtime.proceed(sandbox_id)
                    self._tell(sandbox_id, halted=False)
            except (CpuosError, OSError) as error:
                log.warning("sandbox not continued", sandbox=sandbox_id, why=str(error))

    def _running(self) -> list[Record]:
        """Those that are being saved are frozen by their agent, and must be able to end that."""
        return [record for record in self._ledger.all() if record.stage is Stage.RUNNING]
