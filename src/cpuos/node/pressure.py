"""What the node does when its host runs short of memory, one step after the other, each only while the one before did
not help: ready sandboxes go, idle ones are paused, nothing new is taken.

The first and the last step are the node's own. Pausing takes the gateway too, so the server does it: it reads the level
in the node's facts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import structlog

from cpuos.node import host
from cpuos.node.admission import Admission
from cpuos.types.node import PressureFacts, PressureLevel

__all__ = ["PressureWatch"]

log = structlog.get_logger("cpuos.node")

LOOK_S = 1.0
LAYERS_S = 5.0
# A step has so long to help before the next one is taken.
PAUSE_AFTER_S, REFUSE_AFTER_S = 3.0, 10.0
# So long there must be enough before it is over.
CALM_S = 5.0


class PressureWatch:
    """Looks each second, between `start` and `close`."""

    def __init__(
        self,
        admission: Admission,
        *,
        shrink: Callable[[], Awaitable[int]],
        read: Callable[[], str] = host.short_of_memory,
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
        why = self._read()
        if not why:
            self._short_since = None
            self._calm_since = now if self._calm_since is None else self._calm_since
            if self.facts.level is not PressureLevel.NONE and now - self._calm_since >= CALM_S:
                self._go_to(PressureLevel.NONE, why="")
            return
        self._calm_since = None
        self._short_since = now if self._short_since is None else self._short_since
        level = _level_after(now - self._short_since)
        if level.rank > self.facts.level.rank:
            self._go_to(level, why=why)
        else:
            self._say(self.facts.level, why=why)
        if await self._shrink():
            log.warning("the pool gave up its sandboxes", why=why)

    def _go_to(self, level: PressureLevel, *, why: str) -> None:
        self.facts = PressureFacts(
            level=level, why=why, since=datetime.now(UTC), times=self.facts.times + (level is not PressureLevel.NONE)
        )
        self._say(level, why=why)
        log.warning("memory pressure", level=level, why=why)

    def _say(self, level: PressureLevel, *, why: str) -> None:
        """As it is now: the reason may be another than the one that it began with."""
        self.facts = self.facts.model_copy(update={"why": why})
        refuses = level is PressureLevel.REFUSE_NEW
        self._admission.refusing = f"the node takes nothing new for now: {why}" if refuses else ""


def _level_after(short_s: float) -> PressureLevel:
    if short_s >= REFUSE_AFTER_S:
        return PressureLevel.REFUSE_NEW
    return PressureLevel.PAUSE_IDLE if short_s >= PAUSE_AFTER_S else PressureLevel.SHRINK_POOL
