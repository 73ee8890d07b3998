"""Idle sandboxes are paused when their node is short of memory, the longest idle first: what that costs their users is
a moment at their next call. Those that calls do not resume are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row, select

from cpuos.errors import CpuosError
from cpuos.scheduler.base import Scheduler
from cpuos.server.alarms import Alarms
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.models import SandboxRow
from cpuos.server.gateway import GatewayControl, SandboxActivity
from cpuos.server.pausing import Pausing
from cpuos.server.tasks import Tasks
from cpuos.types.node import PressureLevel
from cpuos.types.sandbox import SandboxState

__all__ = ["AT_ONCE", "Relief"]

_log = structlog.get_logger("cpuos.server")
# A pause writes memory to the disk; what it frees is seen at the next look.
AT_ONCE = 2
_rows = SandboxRow.__table__
_RESUMABLE = select(*_rows.c).where(_rows.c.state == SandboxState.RUNNING.value, _rows.c.auto_resume.is_(True))


class Relief:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        gateway: GatewayControl,
        pausing: Pausing,
        alarms: Alarms,
        tasks: Tasks,
        clock: Clock,
        idle_s: float,
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._gateway = gateway
        self._pausing = pausing
        self._alarms = alarms
        self._tasks = tasks
        self._clock = clock
        self._idle = timedelta(seconds=idle_s)

    async def run(self) -> None:
        """A step of the reconciler."""
        await self._scheduler.refresh()
        await self._alarms.look()
        short = {
            view.facts.node
            for view in self._scheduler.nodes()
            if view.facts.pressure.level.rank >= PressureLevel.PAUSE_IDLE.rank
        }
        if short:
            await self._pause_some(short)

    async def _pause_some(self, nodes: set[str]) -> None:
        async with self._database.read() as connection:
            rows = [row for row in (await connection.execute(_RESUMABLE)).all() if row.node in nodes]
        activity = await self._gateway.activity()
        before = self._clock() - self._idle
        idle = [(since, row) for row in rows if (since := self._idle_since(row, activity)) and since <= before]
        chosen = [row for _, row in sorted(idle, key=lambda one: one[0])[:AT_ONCE]]
        await asyncio.gather(*(self._pause(row, before) for row in chosen))

    def _idle_since(self, row: Row[Any], activity: Mapping[str, SandboxActivity]) -> datetime | None:
        told = activity.get(row.id)
        if told is None or told.busy or told.suspended or told.idle_since is None or self._tasks.busy(row.id):
            return None
        return max(datetime.fromtimestamp(told.idle_since, UTC), row.changed_at)

    async def _pause(self, row: Row[Any], before: datetime) -> None:
        reason = f"its node is short of memory, and it was idle for over {self._idle.total_seconds():g} s"
        try:
            await self._pausing.pause(row, reason=reason, idle_before=before)
        except CpuosError as error:
            if error.code != "sandbox_busy":
                _log.warning("idle sandbox not paused for its node", sandbox=row.id, error=str(error))
