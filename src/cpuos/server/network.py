"""Network policies: the record is what is wanted; a node is told, and told again until it has put it in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import Row, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import CpuosError, Unavailable
from cpuos.scheduler.base import Scheduler
from cpuos.server.db.database import Database
from cpuos.server.db.models import SandboxRow, Workspace
from cpuos.server.db.sandboxes import row_of
from cpuos.server.states import Verb, sources, unusable
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer, SandboxNetwork
from cpuos.types.sandbox import LIVE_STATES, SandboxState

__all__ = ["Networks"]

_log = structlog.get_logger("cpuos.server.network")
_rows = SandboxRow.__table__
_workspaces = Workspace.__table__
_LAST_VERSION = 1 << 53
_LIVE = [state.value for state in LIVE_STATES]


class Networks:
    def __init__(self, database: Database, scheduler: Scheduler) -> None:
        self._database = database
        self._scheduler = scheduler

    async def effective(self, row: Row[Any]) -> EffectivePolicy:
        """What holds for the sandbox now. Read at once: a version never stands for two policies."""
        of_both = select(_rows.c.network_version, _rows.c.network, _workspaces.c.network.label("of_workspace"))
        of_both = of_both.where(_rows.c.id == row.id, _workspaces.c.id == _rows.c.workspace)
        async with self._database.read() as connection:
            return _effective((await connection.execute(of_both)).one())

    async def workspace_policy(self, workspace: str) -> NetworkPolicy:
        async with self._database.read() as connection:
            return await _workspace_policy(connection, workspace)

    async def describe(self, row: Row[Any]) -> SandboxNetwork:
        return SandboxNetwork(
            policy=NetworkPolicy.model_validate(row.network),
            workspace_policy=await self.workspace_policy(row.workspace),
            version=row.network_version,
            applied=row.network_applied == row.network_version,
        )

    async def update_sandbox(self, row: Row[Any], policy: NetworkPolicy) -> Row[Any]:
        """Return when the node has put it in place."""
        changed = update(_rows).where(_rows.c.id == row.id, _rows.c.state.in_(_LIVE))
        values = {"network": policy.model_dump(mode="json"), "network_version": _rows.c.network_version + 1}
        async with self._database.write() as connection:
            updated = (await connection.execute(changed.values(values).returning(*_rows.c))).one_or_none()
            current = updated or await row_of(connection, row.id)
        assert current is not None  # records are never removed
        state = SandboxState(current.state)
        if state not in sources(Verb.STOP):
            raise unusable(row.id, state, reason=current.reason, action="change the network of sandbox")
        if not await self.tell(current):
            raise _not_yet(f"sandbox {row.id}")
        async with self._database.read() as connection:
            return await row_of(connection, row.id) or current

    async def update_workspace(self, workspace: str, policy: NetworkPolicy) -> None:
        """Return when it is in place for every live sandbox."""
        stored = update(_workspaces).where(_workspaces.c.id == workspace)
        of_workspace = (_rows.c.workspace == workspace) & _rows.c.state.in_(_LIVE)
        async with self._database.write() as connection:
            await connection.execute(stored.values(network=policy.model_dump(mode="json")))
            risen = update(_rows).where(of_workspace).values(network_version=_rows.c.network_version + 1)
            await connection.execute(risen)
        if await self.tell_pending(workspace=workspace):
            raise _not_yet("some sandboxes")

    async def tell_pending(self, *, workspace: str | None = None) -> int:
        """Tell the nodes what they have not put in place yet; how many that still are. For the reconciler too."""
        left = 0
        for row in await self._pending(workspace):
            left += not await self.tell(row)
        return left

    async def _pending(self, workspace: str | None) -> Sequence[Row[Any]]:
        # One that is being created gets its policy with its create; what changed meanwhile is told once it runs.
        # A paused one gets it with its resume.
        running = _rows.c.state == SandboxState.RUNNING.value
        statement = select(*_rows.c).where(running, _rows.c.network_applied < _rows.c.network_version)
        if workspace is not None:
            statement = statement.where(_rows.c.workspace == workspace)
        async with self._database.read() as connection:
            return (await connection.execute(statement.limit(1000))).all()

    async def tell(self, row: Row[Any], *, tries: int = 3) -> bool:
        """Tell the sandbox's node the newest policy on record; whether it has put it in place."""
        if row.state in (SandboxState.CREATING.value, SandboxState.PAUSED.value):
            return True  # its create looks again once it runs, its resume begins with the newest
        policy = await self.effective(row)
        try:
            await self._scheduler.client(row.node).update_network(row.id, generation=row.generation, policy=policy)
        except CpuosError as error:
            known = error.details.get("known") if error.code == "stale_policy" else None
            if tries > 1 and isinstance(known, int) and (later := await self._later(row, known=known)) is not None:
                return await self.tell(later, tries=tries - 1)
            _log.warning("network policy not in place yet", sandbox=row.id, version=policy.version, error=str(error))
            return False
        newer = (_rows.c.id == row.id) & (_rows.c.network_applied < policy.version)
        async with self._database.write() as connection:
            await connection.execute(update(_rows).where(newer).values(network_applied=policy.version))
        return True

    async def _later(self, row: Row[Any], *, known: int) -> Row[Any] | None:
        """The record with a version that the node takes, which has `known` in force.

        It was told by a call that overtook this one, or from a later history than this database has.
        """
        if known >= _LAST_VERSION:
            return None
        behind = update(_rows).where(_rows.c.id == row.id, _rows.c.network_version < known)
        async with self._database.write() as connection:
            risen = await connection.execute(behind.values(network_version=known + 1).returning(_rows.c.id))
            if risen.one_or_none() is not None:
                _log.warning("network policy of a later history replaced", sandbox=row.id, version=known)
            current = await row_of(connection, row.id)
        return current if current is not None and current.network_version > row.network_version else None


def _effective(told: Row[Any]) -> EffectivePolicy:
    own = PolicyLayer(origin="sandbox", policy=NetworkPolicy.model_validate(told.network))
    workspace = PolicyLayer(origin="workspace", policy=NetworkPolicy.model_validate(told.of_workspace))
    return EffectivePolicy(version=told.network_version, layers=[workspace, own])


async def _workspace_policy(connection: AsyncConnection, workspace: str) -> NetworkPolicy:
    statement = select(_workspaces.c.network).where(_workspaces.c.id == workspace)
    return NetworkPolicy.model_validate((await connection.execute(statement)).scalar_one())


def _not_yet(what: str) -> Unavailable:
    return Unavailable(
        f"cannot put the network policy of {what} in place yet",
        "it is on record, and is put in place as soon as the node answers; until then the old one holds",
        code="node_unavailable",
        hint="cpuos status",
    )
