"""What is kept no longer: audit entries, which go into files first, and records of sandboxes that ended long ago.

Both go by whole days, so that a busy server does not write an entry about removal every few seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Row, delete, exists, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.durable import sync_folder
from cpuos.json_lines import last_lines
from cpuos.server.audit import SYSTEM, Audit
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.models import AuditRow, ConnectionRow, OpenIntent, PortRow, SandboxRow, SnapshotRow
from cpuos.types.audit import AuditEntry, AuditResult
from cpuos.types.sandbox import LIVE_STATES

__all__ = ["AuditArchive", "Retention", "RetentionRules"]

ENTRIES_AT_ONCE = 2000
SANDBOXES_AT_ONCE = 200
_DAY_S = 86400.0

_log = structlog.get_logger("cpuos.server.retention")
_audit = AuditRow.__table__
_sandboxes = SandboxRow.__table__


@dataclass(frozen=True, kw_only=True)
class RetentionRules:
    """0: for ever. Less than a day is a day."""

    audit_s: float = 0.0
    sandboxes_s: float = 0.0
    archive: Path | None = None
    """Folder for entries that leave the database; without one none leaves it."""


class AuditArchive:
    """`YYYY-MM.jsonl` by the month of an entry. An entry is on the disk before `append` returns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, set[int]] = {}
        """Ids at the end of each file: a batch that was written and not yet removed is not written twice."""

    def append(self, entries: Sequence[AuditEntry]) -> list[Path]:
        """The files that they are in. Raises OSError where not all could be written."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        months: dict[str, list[AuditEntry]] = {}
        for entry in entries:
            months.setdefault(f"{entry.at:%Y-%m}.jsonl", []).append(entry)
        for name, chosen in months.items():
            self._append_to(name, chosen)
        sync_folder(self._folder)
        return [self._folder / name for name in months]

    def _append_to(self, name: str, entries: Sequence[AuditEntry]) -> None:
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            whole, end = last_lines(file, most=ENTRIES_AT_ONCE)
            file.truncate(end)
            file.seek(end)
            known = self._known.pop(name, None)  # back when all is written: else the file is looked at anew
            if known is None:
                known = {json.loads(line)["id"] for line in whole}
            fresh = [entry for entry in entries if entry.id not in known]
            file.writelines(entry.model_dump_json().encode() + b"\n" for entry in fresh)
            file.flush()
            os.fsync(file.fileno())
        self._known[name] = {entry.id for entry in entries}


class Retention:
    def __init__(self, *, database: Database, audit: Audit, clock: Clock, rules: RetentionRules) -> None:
        self._database = database
        self._audit = audit
        self._clock = clock
        self._rules = rules
        self._archive = AuditArchive(rules.archive) if rules.archive else None
        self._nothing_before: dict[str, datetime] = {}
        """By kind: nothing older than this was left. It is looked for again a day later: that reads whole tables."""

    async def prune(self) -> None:
        """At most some thousand entries and some hundred records a call, so that nobody waits for it."""
        if self._rules.sandboxes_s:
            await self._once_a_day("sandboxes", self._before(self._rules.sandboxes_s), self._prune_sandboxes)
        if self._rules.audit_s and self._archive is not None:
            await self._once_a_day("audit", self._before(self._rules.audit_s), self._prune_audit)

    async def _once_a_day(self, kind: str, before: datetime, prune_some: Callable[[datetime], Awaitable[bool]]) -> None:
        if self._nothing_before.get(kind) != before and not await prune_some(before):
            self._nothing_before[kind] = before

    def _before(self, kept_s: float) -> datetime:
        """The midnight before which things go."""
        oldest = self._clock() - timedelta(seconds=max(kept_s, _DAY_S))
        return oldest.replace(hour=0, minute=0, second=0, microsecond=0)

    async def _prune_audit(self, before: datetime) -> bool:
        """False when there was nothing."""
        assert self._archive is not None
        first = select(_audit.c.id, _audit.c.at).order_by(_audit.c.id).limit(ENTRIES_AT_ONCE).subquery()
        old = select(first.c.id).where(first.c.at < before, first.c.id.not_in(select(OpenIntent.id)))
        async with self._database.read() as connection:
            statement = select(*_audit.c).where(_audit.c.id.in_(old)).order_by(_audit.c.id)
            rows = (await connection.execute(statement)).all()
        if not rows:
            return False
        entries = [AuditEntry.model_validate(row._mapping) for row in rows]
        try:
            files = await asyncio.to_thread(self._archive.append, entries)
        except OSError as error:
            _log.error("audit entries stay: their archive cannot be written", error=str(error))
            return True
        detail = {"first": rows[0].id, "last": rows[-1].id, "before": before.isoformat()}
        async with self._database.write() as connection:
            await connection.execute(delete(_audit).where(_audit.c.id.in_([row.id for row in rows])))
            for workspace, count in Counter(row.workspace for row in rows).items():
                names = [path.name for path in files]
                await self._note(connection, workspace, "audit.prune", {"entries": count, "files": names, **detail})
        return True

    async def _prune_sandboxes(self, before: datetime) -> bool:
        """Those of which nothing else is left: no output, no record of a connection, no snapshot. False: there was
        none."""
        rows = _sandboxes.c
        statement = (
            select(rows.id, rows.workspace)
            .where(
                rows.state.not_in([state.value for state in LIVE_STATES]),
                rows.gateway_stage == "forgotten",
                rows.changed_at < before,
                ~exists().where(SnapshotRow.sandbox == rows.id),
                ~exists().where(ConnectionRow.workspace == rows.workspace, ConnectionRow.sandbox == rows.id),
            )
            .order_by(rows.changed_at)
            .limit(SANDBOXES_AT_ONCE)
        )
        async with self._database.read() as connection:
            found = (await connection.execute(statement)).all()
        if not found:
            return False
        ids = [row.id for row in found]
        async with self._database.write() as connection:
            await connection.execute(delete(PortRow).where(PortRow.sandbox.in_(ids)))
            await connection.execute(delete(_sandboxes).where(rows.id.in_(ids)))
            for workspace in {row.workspace for row in found}:
                await self._note_sandboxes(connection, workspace, found, before=before)
        return True

    async def _note_sandboxes(
        self, connection: AsyncConnection, workspace: str, found: Sequence[Row[Any]], *, before: datetime
    ) -> None:
        ids = [row.id for row in found if row.workspace == workspace]
        await self._note(connection, workspace, "sandbox.prune", {"sandboxes": ids, "before": before.isoformat()})

    async def _note(self, connection: AsyncConnection, workspace: str, action: str, detail: dict[str, Any]) -> None:
        await self._audit.note(
            connection,
            workspace=workspace,
            actor=SYSTEM,
            action=action,
            target="",
            sandbox=None,
            result=AuditResult.OK,
            detail=detail,
        )
