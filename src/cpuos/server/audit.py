"""The audit table: an intent before each action, an outcome after it, never changed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import bindparam, delete, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.clock import Clock
from cpuos.server.db.models import AuditRow, OpenIntent
from cpuos.types.audit import AuditEntry, AuditList, AuditPhase, AuditResult

__all__ = ["SYSTEM", "Audit", "Intent", "list_entries"]

_audit = AuditRow.__table__
_open = OpenIntent.__table__
_INSERT = insert(_audit)
_INSERT_INTENT = insert(_audit).returning(_audit.c.id)
_OPEN = insert(_open)
_CLOSE = delete(_open).where(_open.c.id == bindparam("intent"))

SYSTEM = "system"
"""The actor of what the reconciler does by itself."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What its outcome repeats of it."""

    id: int
    workspace: str
    actor: str
    action: str
    target: str
    sandbox: str | None = None


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
        detail: dict[str, Any] | None = None,
    ) -> Intent:
        """Write the intent; what it returns ties the outcome to it."""
        now = self._clock()
        values = {"workspace": workspace, "actor": actor, "action": action, "target": target}
        entry = {"at": now, "phase": AuditPhase.INTENT.value, "detail": detail or {}, **values}
        intent_id = (await connection.execute(_INSERT_INTENT, entry)).scalar_one()
        opened = {"id": intent_id, "epoch": self._epoch, "deadline_at": now + self._deadline}
        await connection.execute(_OPEN, opened)
        return Intent(id=intent_id, **values)

    async def conclude(
        self,
        connection: AsyncConnection,
        intent: Intent,
        *,
        result: AuditResult,
        sandbox: str | None = None,
        detail: dict[str, Any] | None = None,
    ) -> bool:
        """Write the outcome; False when the intent has one already."""
        closed = await connection.execute(_CLOSE, {"intent": intent.id})
        if closed.rowcount != 1:
            return False
        entry = {
            "at": self._clock(),
            "phase": AuditPhase.OUTCOME.value,
            "intent_id": intent.id,
            "result": result.value,
            "workspace": intent.workspace,
            "actor": intent.actor,
            "action": intent.action,
            "target": intent.target or sandbox or "",
            "sandbox": sandbox or intent.sandbox,
            "detail": detail or {},
        }
        await connection.execute(_INSERT, entry)
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
        entry = {
            "at": self._clock(),
            "phase": AuditPhase.OUTCOME.value,
            "result": result.value,
            "workspace": workspace,
            "actor": actor,
            "action": action,
            "target": target,
            "sandbox": sandbox,
            "detail": detail or {},
        }
        await connection.execute(_INSERT, entry)

    async def open_intents(self, connection: AsyncConnection) -> list[Intent]:
        """Intents that no running handler will end: of an earlier start of the server, or past their deadline."""
        stale = or_(OpenIntent.epoch < self._epoch, OpenIntent.deadline_at < self._clock())
        columns = (_audit.c.id, _audit.c.workspace, _audit.c.actor, _audit.c.action, _audit.c.target, _audit.c.sandbox)
        statement = select(*columns).join(_open, _open.c.id == _audit.c.id).where(stale)
        rows = (await connection.execute(statement.order_by(_audit.c.id).limit(1000))).all()
        return [Intent(**row._mapping) for row in rows]


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
        # An intent was written before it was known which sandbox its reference means: its outcome says it.
        outcomes = select(AuditRow.intent_id).where(AuditRow.workspace == workspace, AuditRow.sandbox == sandbox)
        statement = statement.where(or_(AuditRow.sandbox == sandbox, AuditRow.id.in_(outcomes)))
    if action is not None:
        statement = statement.where(or_(AuditRow.action == action, AuditRow.action.startswith(f"{action}.")))
    rows = (await connection.execute(statement.order_by(AuditRow.id).limit(limit + 1))).all()
    entries = [AuditEntry.model_validate(row._mapping) for row in rows[:limit]]
    return AuditList(entries=entries, next_after=entries[-1].id if len(rows) > limit else None)
