"""Recreate: a sandbox that was lost runs again under its id, as its next generation, from the files that were kept.

Its files are a snapshot of the system from the loss on, so that whatever fails here leaves them as they were: then it
is lost as before, and may be made anew again. What knows its earlier generation - tickets, previews, streams - is void.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row
from sqlalchemy.exc import IntegrityError

from cpuos.errors import Conflict, CpuosError, SandboxGone, Unavailable
from cpuos.scheduler.base import Demand, Scheduler
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.ports import close_ports
from cpuos.server.db.sandboxes import advance, row_of
from cpuos.server.db.snapshots import rescued_snapshot
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.quotas import Quotas
from cpuos.server.snapshots import RESCUED_KEPT, Snapshots
from cpuos.server.states import Verb, unusable
from cpuos.server.tasks import Tasks
from cpuos.types.sandbox import SandboxState

__all__ = ["Recreating"]

_log = structlog.get_logger("cpuos.server.recreating")
S = SandboxState

Begun = Callable[[str], None]


class Recreating:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        snapshots: Snapshots,
        quotas: Quotas,
        tasks: Tasks,
        clock: Clock,
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._snapshots = snapshots
        self._quotas = quotas
        self._tasks = tasks
        self._clock = clock

    async def recreate(self, row: Row[Any], *, intent: int | None, begun: Begun) -> Row[Any]:
        """It runs again, or an error and it is lost as before. A running one stays as it is."""
        while True:
            state = S(row.state)
            if state is S.RUNNING:
                return row
            if state is S.LOST:
                work = self._recreate(row, intent=intent, begun=begun)
                return await asyncio.shield(self._tasks.share(row.id, "recreate", work))
            creation = self._lifecycle.creation(row.id)
            if state is not S.CREATING or creation is None:
                raise unusable(row.id, state, reason=row.reason, action="recreate sandbox")
            await creation.ended.wait()
            row = await self._reload(row)

    async def _recreate(self, row: Row[Any], *, intent: int | None, begun: Begun) -> Row[Any]:
        origin = await self._files_of(row)
        # What is left of it at the node is in the snapshot.
        await self._scheduler.client(row.node).delete(row.id, generation=row.generation)

        async def begin(deadline: datetime) -> Row[Any]:
            begin_row = await self._begin(row, deadline=deadline, intent=intent)
            begun(row.id)
            return begin_row

        made = await self._lifecycle.recreate(row, _demand(row), origin=origin, begin=begin)
        _log.info("sandbox recreated", sandbox=row.id, generation=made.generation, snapshot=origin.id)
        try:
            await self._snapshots.delete(origin)
        except CpuosError as error:  # it goes when its day is over
            _log.warning("snapshot of a lost sandbox not removed yet", snapshot=origin.id, error=str(error))
        return made

    async def _files_of(self, row: Row[Any]) -> Row[Any]:
        """The snapshot that holds its files."""
        what = f"cannot recreate sandbox {row.id}"
        if not await self._snapshots.rescue(row):
            why = "its node has not given what is left of its files yet"
            raise Unavailable(what, why, code="node_unavailable", hint="repeat the call; cpuos status")
        async with self._database.read() as connection:
            origin = await rescued_snapshot(connection, row)
        if origin is not None:
            return origin
        lost_at = row.lost_at or row.changed_at
        why = "its files are gone: nothing of them could be kept when it was lost, or too many were lost since"
        if self._clock() - lost_at > RESCUED_KEPT:
            why = f"its files are gone: they are kept for a day, and it was lost on {lost_at:%Y-%m-%d at %H:%M} UTC"
        raise SandboxGone(what, why, code="sandbox_lost", hint="cpuos create")

    async def _begin(self, row: Row[Any], *, deadline: datetime, intent: int | None) -> Row[Any]:
        now = self._clock()
        changes = {
            "generation": row.generation + 1,
            "reason": "",
            "intent": intent,
            "failure": None,
            "gateway_stage": "attached",
            "deadline_at": deadline,
            "expires_at": now + timedelta(seconds=row.timeout_s),
            "started_at": None,
            "ended_at": None,
            "paused_at": None,
            "left_s": None,
            "lost_at": row.lost_at or row.changed_at,
            "lost_reason": row.lost_reason or row.reason,
        }
        try:
            async with self._database.write() as connection:
                await self._quotas.check_sandboxes(connection, row.workspace)
                begun = await advance(connection, row, verb=Verb.RECREATE, now=now, **changes)
                await close_ports(connection, row.id, now=now)
        except IntegrityError as error:
            raise Conflict(
                f"cannot recreate sandbox {row.id}: its name {row.name!r} is taken",
                "another live sandbox of this workspace has it",
                code="name_taken",
                hint=f"cpuos kill {row.name}",
                details={"field": "name", "value": row.name},
            ) from error
        if begun is None:
            raise Conflict(f"cannot recreate sandbox {row.id}: its state has just changed", hint="repeat the call")
        return begun

    async def _reload(self, row: Row[Any]) -> Row[Any]:
        async with self._database.read() as connection:
            current = await row_of(connection, row.id)
        assert current is not None  # records are never removed
        return current


def _demand(row: Row[Any]) -> Demand:
    """What it took before, where its files lie."""
    return Demand(
        template=row.image or row.template,
        runtime=row.runtime,
        min_isolation=None,
        allow_emulated=row.isolation == "emulated",
        cpu=row.cpu,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        node=row.node,
    )
