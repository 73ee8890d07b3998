"""The audit table: an intent before each action, an outcome after it, never changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Row, delete, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.clock import Clock
from cpuos.server.db.models import AuditRow, OpenIntent
from cpuos.types.audit import AuditEntry, AuditList, AuditPhase, AuditResult

__all__ = ["SYSTEM", "Audit", "list_entries"]

SYSTEM = "system"
"""The actor of what the reconciler does by itself."""


class Audit:
    """Writes in the caller's transaction, so that an entry and what it tells of are committed together."""

    def __init__(self, clock: Clock, *, epoch: int, deadline_s: float) -> None:
        self._clock = clock
        self._epoch = epoch
        self._deadline = timedelta(seconds=deadline_s)

    async def intend(
        self,
        connection: AsyncConnection,
        *,
        workspace: str,
        actor: str,
        action: str,
        target: str = "",
        sandbox: str | None = None,
        detail: dict[str, Any] | None = None,
    ) -> int:
        """Write the intent; its id ties the outcome to it."""
        now = self._clock()
        values = {"workspace": workspace, "actor": actor, "action": action, "target": target, "sandbox": sandbox}
        statement = insert(AuditRow).values(at=now, phase=AuditPhase.INTENT.value, detail=detail or {}, **values)
        statement = statement.returning(AuditRow.id)
        intent_id = (await connection.execute(statement)).scalar_one()
        opened = {"id": intent_id, "epoch": self._epoch, "deadline_at": now + self._deadline}
        await connection.execute(insert(OpenIntent).values(**opened))
        return intent_id

    async def conclude(
        self,
        connection: AsyncConnection,
        intent_id: int,
        *,
        result: AuditResult,
        sandbox: str | None = None,
        detail: dict[str, Any] | None = None,
    ) -> bool:
        """Write the outcome; False when the intent has one already."""
        closed = await connection.execute(delete(OpenIntent).where(OpenIntent.id == intent_id))
        if closed.rowcount != 1:
            return False
        copied = select(AuditRow.workspace, AuditRow.actor, AuditRow.action, AuditRow.target, AuditRow.sandbox)
        intent = (await connection.execute(copied.where(AuditRow.id == intent_id))).one()
        values = {**intent._mapping, "detail": detail or {}}
        if sandbox is not None:
            values |= {"sandbox": sandbox, "target": intent.target or sandbox}
        await connection.execute(
            insert(AuditRow).values(
                at=self._clock(),
                phase=AuditPhase.OUTCOME.value,
                intent_id=intent_id,
                result=result.value,
                **values,
            )
        )
        return True

    async def note(
        self,
        connection: AsyncConnection,
        *,
        workspace: str,
        actor: str,
        action: str,
        target: str,
        sandbox: str | None,
        result: AuditResult,
        detail: dict[str, Any] | None = None,
    ) -> None:
        """An outcome without intent: what happened by itself, or was refused before anything began."""
        values = {"workspace": workspace, "actor": actor, "action": action, "target": target, "sandbox": sandbox}
        statement = insert(AuditRow).values(
            at=self._clock(), phase=AuditPhase.OUTCOME.value, result=result.value, detail=detail or {}, **values
        )
        await connection.execute(statement)

    async def open_intents(self, connection: AsyncConnection) -> Sequence[Row[Any]]:
        """Intents that no running handler will end: of an earlier start of the server, or past their deadline."""
        stale = or_(OpenIntent.epoch < self._epoch, OpenIntent.deadline_at < self._clock())
        statement = (
            select(AuditRow.id, AuditRow.workspace, AuditRow.action, AuditRow.target, OpenIntent.epoch)
            .join(OpenIntent, OpenIntent.id == AuditRow.id)
            .where(stale)
            .order_by(AuditRow.id)
            .limit(1000)
        )
        return (await connection.execute(statement)).all()


async def list_entries(
    connection: AsyncConnection,
    workspace: str,
    *,
    sandbox: str | None,
    action: str | None,
    after: int,
    limit: int,
) -> AuditList:
    """Entries in order; `action` is a whole kind (`command.start`) or a noun (`command`)."""
    statement = select(*AuditRow.__table__.c).where(AuditRow.workspace == workspace, AuditRow.id > after)
    if sandbox is not None:
        statement = statement.where(AuditRow.sandbox == sandbox)
    if action is not None:
        statement = statement.where(or_(AuditRow.action == action, AuditRow.action.startswith(f"{action}.")))
    rows = (await connection.execute(statement.order_by(AuditRow.id).limit(limit + 1))).all()
    entries = [AuditEntry.model_validate(row._mapping) for row in rows[:limit]]
    return AuditList(entries=entries, next_after=entries[-1].id if len(rows) > limit else None)
