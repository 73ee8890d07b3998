"""Keeps as many ready sandboxes as are wanted and can be afforded: one is made at a time, while nobody else needs the
processors; those that nobody wants, that are old, or for which there is no room, go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from cpuos.node.journal import Record
from cpuos.node.pool.pressure import Pressure
from cpuos.node.pool.shape import Shape, shape_of_record
from cpuos.node.pool.wishes import share_out

__all__ = ["Keeper", "Plan", "make_plan", "room_under"]

log = structlog.get_logger("cpuos.node")

ROUND_S = 2.0
SETTLE_S = 0.3
"""A create is followed by its sandbox's first work: that comes first."""
RETRY_S, LONGEST_RETRY_S = 2.0, 120.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    surplus: list[Record]
    """These go."""
    short: list[Shape]
    """Of these one more is wanted, the most wanted first."""


def make_plan(ready: list[Record], wanted: Mapping[Shape, int], *, room: int, is_old: Callable[[Record], bool]) -> Plan:
    """`room`: how many there may be in all."""
    shares = share_out(wanted, room=room)
    surplus = [record for record in ready if is_old(record)]
    kept: dict[Shape, list[Record]] = {}
    for record in sorted((one for one in ready if not is_old(one)), key=lambda one: one.changed_at, reverse=True):
        kept.setdefault(shape_of_record(record), []).append(record)
    for shape, records in kept.items():
        surplus += records[shares.get(shape, 0) :]
    lacking = {shape: share - len(kept.get(shape, [])) for shape, share in shares.items()}
    short = [shape for shape, count in sorted(lacking.items(), key=lambda one: -one[1]) if count > 0]
    return Plan(surplus=surplus, short=short)


class Keeper:
    """One task between `start` and `close`."""

    def __init__(
        self,
        *,
        plan: Callable[[], Coroutine[Any, Any, Plan]],
        fill: Callable[[Shape], Coroutine[Any, Any, object]],
        discard: Callable[[Record], Coroutine[Any, Any, None]],
        settle_s: float = SETTLE_S,
        round_s: float = ROUND_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._plan = plan
        self._fill = fill
        self._discard = discard
        self._settle_s = settle_s
        self._round_s = round_s
        self._retry_s = retry_s
        self._asked = asyncio.Event()
        self._working = 0
        self._quiet_from = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="cpuos-pool")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def ask(self) -> None:
        """Look again: something changed."""
        self._asked.set()

    def begin_work(self) -> None:
        """A create or resume goes on: nothing is made meanwhile, but for what is being made already."""
        self._working += 1
        self._idle.clear()

    def end_work(self) -> None:
        self._working -= 1
        self._quiet_from = asyncio.get_running_loop().time() + self._settle_s
        if not self._working:
            self._idle.set()
        self.ask()

    async def _keep(self) -> None:
        retry_s = self._retry_s
        while True:
            try:
                while await self._round():
                    retry_s = self._retry_s
            except Exception as problem:
                log.warning("pool not kept", why=f"{type(problem).__name__}: {problem}", again_in_s=retry_s)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
                continue
            try:
                async with asyncio.timeout(self._round_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            await self._let_work_end()
            self._asked.clear()

    async def _round(self) -> bool:
        """Whether something was done, so that more may be to do."""
        plan = await self._plan()
        for record in plan.surplus:
            await self._discard(record)
        if not plan.short:
            return False
        await self._until_quiet()
        plan = await self._plan()
        if plan.short:
            await self._fill(plan.short[0])
        return bool(plan.short)

    async def _let_work_end(self) -> None:
        """A look takes its share of the processors too; what does not end is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._round_s):
                await self._until_quiet()

    async def _until_quiet(self) -> None:
        """No create goes on, and none has for a moment."""
        loop = asyncio.get_running_loop()
        while True:
            await self._idle.wait()
            pause = self._quiet_from - loop.time()
            if pause <= 0:
                return
            await asyncio.sleep(pause)


def room_under(
    pressure: Pressure, *, ready: int, unit_bytes: int, held_bytes: int, budget_bytes: int, free: int
) -> int:
    """How many ready sandboxes there may be: of the budget of memory, of which those that are there hold `held_bytes`
    and one more would take `unit_bytes`; and of `free` places for sandboxes. None while memory is short."""
    if pressure.is_high:
        return 0
    more = max(0, budget_bytes - held_bytes) // max(1, unit_bytes)
    fewer = 0
    if held_bytes > budget_bytes:
        fewer = -(-(held_bytes - budget_bytes) // max(1, unit_bytes))
    return max(0, min(ready + more - fewer, free))
