"""Takes a gateway's journal over into the audit table: each entry exactly once, whatever restarts in between."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import structlog
from pydantic import Field, ValidationError
from sqlalchemy import Row, bindparam, insert, select

from cpuos.server.cursors import cursor_of, take_cursor
from cpuos.server.db.database import Database
from cpuos.server.db.models import AuditRow
from cpuos.server.db.sandboxes import find_sandboxes
from cpuos.server.gateway import GatewayControl, JournalPage
from cpuos.types.audit import AuditPhase, AuditResult
from cpuos.types.base import Answer

__all__ = ["JournalEntry", "JournalIngest"]

PAGE = 500
_log = structlog.get_logger("cpuos.server.journal")


_audit = AuditRow.__table__
_intents = _audit.alias("intents")
# An intent of the same page is found too: rows go in one after the other.
_OF_INTENT = select(_intents.c.id).where(
    _intents.c.source == bindparam("of_source"), _intents.c.source_seq == bindparam("of_seq")
)
_TAKE = insert(_audit).values(intent_id=_OF_INTENT.scalar_subquery())


class JournalEntry(Answer):
    """What a gateway writes down of one action. A gateway reads guests' bytes, so nothing here is believed twice:
    the workspace is that of the sandbox's record, never the one that the entry names."""

    seq: int = Field(ge=0)
    at: datetime
    sandbox: str
    actor: str = Field(max_length=63)
    action: str = Field(max_length=63, pattern=r"^[a-z]+\.[a-z_]+$")
    phase: AuditPhase
    target: str = Field("", max_length=8192)
    result: AuditResult | None = None
    intent: int | None = None
    """Of an outcome: the number of its intent."""
    detail: dict[str, Any] = Field(default_factory=dict)


class JournalIngest:
    def __init__(self, database: Database, gateway: GatewayControl) -> None:
        self._database = database
        self._gateway = gateway
        self._source: str | None = None
        self._next = 0

    async def run(self) -> int:
        """Take over what is new; returns the number of entries."""
        taken = 0
        while True:
            page = await self._gateway.journal(self._next, limit=PAGE)
            if page.source != self._source:
                await self._switch(page.source)
                continue
            if not page.entries:
                return taken
            await self._store(page)
            taken += len(page.entries)
            self._next = page.next

    async def _switch(self, source: str) -> None:
        """Another gateway instance than before: go on where its journal was left."""
        self._next = await cursor_of(self._database, source)
        self._source = source

    async def _store(self, page: JournalPage) -> None:
        entries = [entry for raw in page.entries if (entry := _read(raw, page.source)) is not None]
        async with self._database.write() as connection:
            if not await take_cursor(connection, page.source, expected=self._next, following=page.next):
                self._source = None  # another reader was here: look up the cursor again
                return
            owners = {row.id: row for row in await find_sandboxes(connection, {entry.sandbox for entry in entries})}
            rows = [_row(entry, owners[entry.sandbox], page.source) for entry in entries if entry.sandbox in owners]
            if rows:
                await connection.execute(_TAKE, rows)
        for entry in entries:
            if entry.sandbox not in owners:
                _log.warning("journal entry of an unknown sandbox", sandbox=entry.sandbox, seq=entry.seq)


def _read(raw: dict[str, Any], source: str) -> JournalEntry | None:
    try:
        return JournalEntry.model_validate(raw)
    except ValidationError as error:
        _log.error("journal entry out of contract", source=source, entry=str(raw)[:500], error=str(error))
        return None


def _row(entry: JournalEntry, owner: Row[Any], source: str) -> dict[str, Any]:
    return {
        "at": entry.at,
        "workspace": owner.workspace,
        "actor": entry.actor,
        "action": entry.action,
        "target": entry.target,
        "sandbox": entry.sandbox,
        "phase": entry.phase.value,
        "result": entry.result.value if entry.result else None,
        "detail": entry.detail,
        "source": source,
        "source_seq": entry.seq,
        "of_source": source,
        "of_seq": entry.intent,
    }
