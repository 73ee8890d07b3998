"""What the node does when its host runs short of memory, one step after the other, each only while the one before did
not help: ready sandboxes go, idle ones are paused, nothing new is taken.

The first and the last step are the node's own. Pausing takes the gateway too, so the server does it: it reads the level
in the node's facts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from cpuos.node import host
from cpuos.node.admission import Admission
from cpuos.types.node import PressureFacts, PressureLevel

__all__ = ["PressureWatch", "ShortMemory", "read_memory"]

log = structlog.get_logger("cpuos.node")

LOOK_S = 1.0
LAYERS_S = 5.0
# A step has so long to help before the next one is taken.
PAUSE_AFTER_S, REFUSE_AFTER_S = 3.0, 10.0
# So long there must be enough before it is over.
CALM_S = 5.0
_LEAST_FREE_MIB, _LEAST_FREE_SHARE = 512, 16
_MOST_STALLED = 10.0


@dataclass(frozen=True, kw_only=True)
class ShortMemory:
    """Why memory is short; empty: it is not."""

    why: str = ""


def read_memory(*, mark_mib: int = 0, proc: Path = Path("/proc")) -> ShortMemory:
    """`mark_mib`: so much is to be free; 0: a sixteenth of the host's, 512 MiB at least."""
    needed = mark_mib or max(_LEAST_FREE_MIB, host.memory_mib() // _LEAST_FREE_SHARE)
    free = host.available_memory_mib(proc)
    if free < needed:
        return ShortMemory(why=f"{free} MiB of the host's memory are free, and {needed} MiB are to be")
    stalled = host.memory_stalled(proc)
    if stalled > _MOST_STALLED:
        return ShortMemory(why=f"the host waited for memory {stalled:g} % of the last ten seconds")
    return ShortMemory()


class PressureWatch:
    """Looks each second, between `start` and `close`."""

    def __init__(
        self,
        admission: Admission,
        *,
        shrink: Callable[[], Awaitable[int]],
        read: Callable[[], ShortMemory] = read_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admission = admission
        self._shrink = shrink
        self._read = read
        self._clock = clock
        self._short_since: float | None = None
        self._calm_since: float | None = None
        self._measured_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.facts = PressureFacts()

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("memory pressure not looked at")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """One look, and the step that is due."""
        now = self._clock()
        if now - self._measured_at >= LAYERS_S:
            self._measured_at = now
            await asyncio.to_thread(self._admission.measure)
        short = self._read()
        if not short.why:
            self._short_since = None
            self._calm_since = now if self._calm_since is None else self._calm_since
            if self.facts.level is not PressureLevel.NONE and now - self._calm_since >= CALM_S:
                self._go_to(PressureLevel.NONE, why="")
            return
        self._calm_since = None
        self._short_since = now if self._short_since is None else self._short_since
        level = _level_after(now - self._short_since)
        if level.rank > self.facts.level.rank:
            self._go_to(level, why=short.why)
        if await self._shrink():
            log.warning("the pool gave up its sandboxes", why=short.why)

    def _go_to(self, level: PressureLevel, *, why: str) -> None:
        self.facts = PressureFacts(
            level=level, why=why, since=datetime.now(UTC), times=self.facts.times + (level is not PressureLevel.NONE)
        )
        refuses = level is PressureLevel.REFUSE_NEW
        self._admission.refusing = f"the node takes nothing new for now: {why}" if refuses else ""
        log.warning("memory pressure", level=level, why=why)


def _level_after(short_s: float) -> PressureLevel:
    if short_s >= REFUSE_AFTER_S:
        return PressureLevel.REFUSE_NEW
    return PressureLevel.PAUSE_IDLE if short_s >= PAUSE_AFTER_S else PressureLevel.SHRINK_POOL
