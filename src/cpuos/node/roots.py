"""What sandboxes have outside of /workspace is saved now and then, while they run: should one die, that is there as of
then.

Each in its own time, one after the other, and none in which nothing happened. A save makes its sandbox stand still for
a moment, so no more than a fiftieth of its time goes into it, however short its interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog

from cpuos.errors import CpuosError
from cpuos.node.images import root_name
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.runtimes.base import Capability, Process

__all__ = ["Roots"]

log = structlog.get_logger("cpuos.node")

_ROUND_S = 5.0
_COST = 50
# What a sandbox in which nothing runs takes of a processor: 0.3 ms a second were measured.
_IDLE_SHARE, _IDLE_S = 0.001, 0.005
# A change can cost less than that noise: so many times in a row at most one is taken for idle.
_PASSED_OVER = 12


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What is known of the root of one that runs."""

    process: Process | None
    at: datetime
    """When it was saved, or when that process began."""
    took_s: float = 0.0
    cpu_s: float | None = None
    """What it had used of the processors then."""
    looked_at: datetime | None = None
    passed_over: int = 0


class Roots:
    """One task between `start` and `close`; `keep` saves one."""

    def __init__(self, kit: Kit, *, keep: Callable[[Record], Awaitable[None]], interval_s: float) -> None:
        self._kit = kit
        self._ledger = kit.ledger
        self._keep = keep
        self._interval_s = interval_s
        self._saved: dict[str, _Saved] = {}
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._repeat(), name="cpuos-roots")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def give_up(self, sandbox_id: str) -> None:
        """A save of it that goes on ends as soon as it can: it is being deleted."""
        saving = self._saving.get(sandbox_id)
        if saving is not None:
            saving.cancel()
            await asyncio.wait([saving])

    async def round(self) -> list[str]:
        """Save all that are due; their ids."""
        records = [record for record in self._ledger.all() if self._interval_of(record) > 0]
        self._saved = {record.id: await self._known(record) for record in records}
        saved = []
        for record in records:
            if self._is_due(record) and await self._is_changed(record) and await self._save(record):
                saved.append(record.id)
        return saved

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s())
            try:
                await self.round()
            except Exception:
                log.exception("roots not saved")

    def _pause_s(self) -> float:
        """Short intervals are looked at more often."""
        shortest = min((one for record in self._ledger.all() if (one := self._interval_of(record)) > 0), default=60.0)
        return min(_ROUND_S, max(0.5, shortest / 4))

    def _interval_of(self, record: Record) -> float:
        """0: its root is not saved by itself."""
        if record.stage is not Stage.RUNNING or record.unsettled:
            return 0.0
        runtime = self._kit.runtimes.find(record.request.runtime)
        if runtime is None or Capability.FILESYSTEM_CHECKPOINT not in runtime.capabilities:
            return 0.0
        if Capability.OWN_KERNEL in runtime.capabilities:  # its layer is on a disk, and is there when it dies
            return 0.0
        asked = record.request.root_interval_s
        return self._interval_s if asked is None else asked

    async def _known(self, record: Record) -> _Saved:
        known = self._saved.get(record.id)
        if known is not None and known.process == record.process:
            return known
        at = record.started_at or record.changed_at
        with suppress(CpuosError):  # there is none, or it is of no use
            saved = await asyncio.to_thread(self._kit.assembly.images.read, root_name(record.id))
            at = max(at, saved.created_at) if saved.generation == record.generation else at
        return _Saved(process=record.process, at=at)

    def _is_due(self, record: Record) -> bool:
        known = self._saved[record.id]
        wait_s = max(self._interval_of(record), _COST * known.took_s)
        return (self._ledger.clock() - (known.looked_at or known.at)) >= timedelta(seconds=wait_s)

    async def _is_changed(self, record: Record) -> bool:
        """Whether anything may have happened in it since."""
        known, now = self._saved[record.id], self._ledger.clock()
        try:
            cpu_s = (await self._kit.runtime_of(record).stats(record.id)).cpu_seconds
        except CpuosError:
            return False  # it ends just now
        idle_s = _IDLE_S + _IDLE_SHARE * (now - known.at).total_seconds()
        if known.cpu_s is None or cpu_s - known.cpu_s > idle_s or known.passed_over >= _PASSED_OVER:
            self._saved[record.id] = _Saved(process=known.process, at=known.at, took_s=known.took_s, cpu_s=cpu_s)
            return True
        self._saved[record.id] = _Saved(
            process=known.process,
            at=known.at,
            took_s=known.took_s,
            cpu_s=known.cpu_s,
            looked_at=now,
            passed_over=known.passed_over + 1,
        )
        return False

    async def _save(self, record: Record) -> bool:
        known, began = self._saved[record.id], self._ledger.clock()
        saving = self._saving[record.id] = asyncio.ensure_future(self._keep(record))
        try:
            await asyncio.wait([saving])
            error = None if saving.cancelled() else saving.exception()
            if error is not None and not isinstance(error, CpuosError):
                raise error
        except asyncio.CancelledError:
            saving.cancel()
            await asyncio.wait([saving])
            raise
        finally:
            del self._saving[record.id]
        now = self._ledger.clock()
        took_s = (now - began).total_seconds()
        if error is not None:
            log.warning("root not saved", sandbox=record.id, error=str(error))
        # One that could not be saved is tried again after its interval.
        done = error is None and not saving.cancelled()
        self._saved[record.id] = _Saved(
            process=known.process,
            at=began if done else known.at,
            took_s=took_s,
            cpu_s=known.cpu_s if done else None,
            looked_at=now,
        )
        return done
