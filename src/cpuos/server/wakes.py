"""What happens by itself: idle sandboxes are paused or ended, paused ones that are called are resumed.

Neither can be made a storm: what failed is tried again later each time, and a sandbox is taken up by calls so often at
most. Who calls one that may not be taken up yet hears that it is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row, select

from cpuos.errors import CpuosError
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.models import SandboxRow
from cpuos.server.db.sandboxes import find_sandboxes
from cpuos.server.gateway import GatewayControl
from cpuos.server.pausing import Pausing
from cpuos.server.tasks import Tasks
from cpuos.types.sandbox import OnEnd, SandboxState

__all__ = ["MAX_WAKES", "Wakes"]

_log = structlog.get_logger("cpuos.server.wakes")
WAKES_WAIT_S = 20.0
# Of one sandbox within the time; each costs the node a restore and a checkpoint.
MAX_WAKES = 20
WAKES_WITHIN = timedelta(minutes=10)
MAX_REMEMBERED = 10_000
_rows = SandboxRow.__table__
_IDLERS = select(*_rows.c).where(_rows.c.state == SandboxState.RUNNING.value, _rows.c.idle_timeout_s.is_not(None))


class Wakes:
    def __init__(
        self, *, database: Database, gateway: GatewayControl, pausing: Pausing, tasks: Tasks, clock: Clock
    ) -> None:
        self._database = database
        self._gateway = gateway
        self._pausing = pausing
        self._tasks = tasks
        self._clock = clock
        self._source = ""
        self._after = 0
        self._past: dict[str, deque[datetime]] = {}
        self._failures: dict[str, tuple[int, datetime]] = {}

    # --- idle ones ---

    async def pause_idle(self) -> None:
        """A step of the reconciler."""
        async with self._database.read() as connection:
            rows = (await connection.execute(_IDLERS)).all()
        if not rows:
            return
        activity = await self._gateway.activity()
        now = self._clock()
        for row in rows:
            told = activity.get(row.id)
            if told is None or told.busy or told.suspended or told.idle_since is None or self._tasks.busy(row.id):
                continue
            # Since it runs at the earliest: so one that could not be paused is not tried at once again.
            since = max(datetime.fromtimestamp(told.idle_since, UTC), row.changed_at)
            before = now - timedelta(seconds=row.idle_timeout_s)
            if since <= before:
                self._tasks.share(row.id, "idle", self._end_idle(row, before))

    async def _end_idle(self, row: Row[Any], before: datetime) -> None:
        reason = f"idle for {row.idle_timeout_s:g} s"
        try:
            if row.on_idle == OnEnd.KILL.value:
                await self._pausing.end_idle(row, reason=reason, idle_before=before)
            else:
                await self._pausing.pause(row, reason=reason, idle_before=before)
        except CpuosError as error:
            if error.code != "sandbox_busy":
                _log.warning("idle sandbox not paused", sandbox=row.id, error=str(error))

    # --- called ones ---

    async def follow(self, *, wait_s: float = WAKES_WAIT_S) -> None:
        """Wait for calls to paused sandboxes, and resume them."""
        page = await self._gateway.wakes(self._after, wait_s=wait_s)
        if page.source != self._source:
            again = self._after > 0  # another gateway process counts from the start
            self._source, self._after = page.source, 0
            if again:
                return
        self._after = page.next
        await self.wake({wake.sandbox for wake in page.wakes})

    async def wake(self, ids: Iterable[str]) -> None:
        """Resume those of them that are paused and may be resumed by a call."""
        async with self._database.read() as connection:
            rows = await find_sandboxes(connection, list(ids))
        now = self._clock()
        for row in rows:
            # One that is on record as running was paused by its node, which was shut down.
            paused = SandboxState(row.state) in (SandboxState.PAUSED, SandboxState.PAUSING, SandboxState.RUNNING)
            if paused and row.auto_resume and self._may_wake(row.id, now):
                self._tasks.share(row.id, "wake", self._resume(row))

    async def _resume(self, row: Row[Any]) -> None:
        try:
            if row.state == SandboxState.RUNNING.value:
                await self._pausing.finish(row)
                async with self._database.read() as connection:
                    (row,) = await find_sandboxes(connection, [row.id])
            if row.state not in (SandboxState.PAUSED.value, SandboxState.PAUSING.value):
                return
            await self._pausing.resume(row, reason="called")
        except CpuosError as error:
            count = self._failures.get(row.id, (0, None))[0] + 1
            again = self._clock() + timedelta(seconds=min(2**count, 60))
            self._failures[row.id] = (count, again)
            _log.warning("called sandbox not resumed", sandbox=row.id, error=str(error))
        else:
            self._failures.pop(row.id, None)
            self._past.setdefault(row.id, deque()).append(self._clock())

    def _may_wake(self, sandbox_id: str, now: datetime) -> bool:
        if len(self._past) > MAX_REMEMBERED or len(self._failures) > MAX_REMEMBERED:
            self._forget(now)
        past = self._past.get(sandbox_id, deque())
        while past and past[0] < now - WAKES_WITHIN:
            past.popleft()
        failed = self._failures.get(sandbox_id)
        return len(past) < MAX_WAKES and (failed is None or failed[1] <= now)

    def _forget(self, now: datetime) -> None:
        self._past = {key: past for key, past in self._past.items() if past and past[-1] >= now - WAKES_WITHIN}
        self._failures = {key: failed for key, failed in self._failures.items() if failed[1] > now}
