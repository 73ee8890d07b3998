"""Ends what an earlier process, or a handler past its deadline, left open: outcomes in the audit, idempotency keys."""

from __future__ import annotations

from typing import Any

import structlog
from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import ERRORS
from cpuos.server.audit import Audit, Intent
from cpuos.server.db.database import Database
from cpuos.server.db.models import SandboxRow, SnapshotRow
from cpuos.server.db.sandboxes import sandbox_of
from cpuos.server.db.snapshots import snapshot_of
from cpuos.server.idempotency import Idempotency
from cpuos.server.lifecycle import Lifecycle
from cpuos.types.audit import AuditResult
from cpuos.types.sandbox import SandboxState
from cpuos.types.snapshot import SnapshotState

__all__ = ["Settlement", "failure_status", "kept_answer"]

_log = structlog.get_logger("cpuos.server.settlement")
_FORKS = frozenset({"sandbox.fork", "snapshot.fork"})
# Those by which a record says which call it goes back to.
_MAKES = frozenset({"sandbox.create", "sandbox.recreate"})


class Settlement:
    def __init__(self, *, database: Database, audit: Audit, idempotency: Idempotency, lifecycle: Lifecycle) -> None:
        self._database = database
        self._audit = audit
        self._idempotency = idempotency
        self._lifecycle = lifecycle

    async def run(self) -> None:
        async with self._database.read() as connection:
            left = await self._audit.open_intents(connection)
        for intent in left:
            if intent.action in _FORKS:
                await self._end_forks(intent)
            async with self._database.write() as connection:
                await self._settle(connection, intent)

    async def prune(self) -> None:
        """Drop the answers of idempotency keys that are a day old."""
        async with self._database.write() as connection:
            await self._idempotency.prune(connection)

    async def _end_forks(self, intent: Intent) -> None:
        """All or none: its caller never heard of those that were made."""
        made = select(*SandboxRow.__table__.c).where(SandboxRow.intent == intent.id)
        async with self._database.read() as connection:
            rows = (await connection.execute(made)).all()
        for row in rows:
            await self._lifecycle.kill(row, reason="its fork was cut off")

    async def _settle(self, connection: AsyncConnection, intent: Intent) -> None:
        if intent.action == "sandbox.snapshot":
            await self._settle_snapshot(connection, intent)
            return
        made = select(*SandboxRow.__table__.c).where(SandboxRow.intent == intent.id)
        row = (await connection.execute(made)).one_or_none() if intent.action in _MAKES else None
        if row is None:
            detail = {"reason": "the server ended before it could say how this ended"}
            await self._audit.conclude(connection, intent, result=AuditResult.UNKNOWN, detail=detail)
            await self._idempotency.free(connection, intent=intent.id)
        elif row.state == SandboxState.CREATING.value:
            return  # not decided yet: the reconciler is at it
        elif row.failure is not None:
            detail = {"code": row.failure["error"]["code"], "what": row.failure["error"]["what"]}
            await self._audit.conclude(connection, intent, result=AuditResult.ERROR, sandbox=row.id, detail=detail)
            await self._idempotency.finish(
                connection, intent=intent.id, status=failure_status(row.failure), answer=row.failure
            )
        else:
            await self._audit.conclude(connection, intent, result=AuditResult.OK, sandbox=row.id)
            await self._idempotency.finish(connection, intent=intent.id, status=201, answer=kept_answer(row))
        _log.info("open intent settled", intent=intent.id, action=intent.action)

    async def _settle_snapshot(self, connection: AsyncConnection, intent: Intent) -> None:
        made = select(*SnapshotRow.__table__.c).where(SnapshotRow.intent == intent.id)
        row = (await connection.execute(made)).one_or_none()
        if row is not None and row.state == SnapshotState.CREATING.value:
            return  # not decided yet: the reconciler is at it
        if row is not None and row.state == SnapshotState.READY.value:
            detail = {"snapshot": row.id, "size_bytes": row.size_bytes}
            await self._audit.conclude(connection, intent, result=AuditResult.OK, sandbox=row.sandbox, detail=detail)
            answer = snapshot_of(row).model_dump(mode="json")
            await self._idempotency.finish(connection, intent=intent.id, status=201, answer=answer)
        else:
            detail = {"reason": row.reason if row is not None else "nothing of it was kept"}
            await self._audit.conclude(connection, intent, result=AuditResult.ERROR, detail=detail)
            await self._idempotency.free(connection, intent=intent.id)


def kept_answer(row: Row[Any]) -> dict[str, Any]:
    """What is stored of a create's answer: all but the ticket, which each repeat gets anew."""
    return {"sandbox": sandbox_of(row).model_dump(mode="json")}


def failure_status(body: dict[str, Any]) -> int:
    return ERRORS[body["error"]["code"]][1]
