"""Takes the records of connections over from a node's records worker: each exactly once, whatever restarts between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx2
import structlog
from pydantic import Field, ValidationError
from sqlalchemy import Row, bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.answers import read_answer
from cpuos.errors import PlatformError, Unavailable
from cpuos.server.clock import Clock
from cpuos.server.connection_commands import with_commands
from cpuos.server.cursors import cursor_of, take_cursor
from cpuos.server.db.database import Database
from cpuos.server.db.models import ConnectionRow
from cpuos.server.db.sandboxes import find_sandboxes
from cpuos.types.base import Answer
from cpuos.types.network import Connection, ConnectionKind, ConnectionList, Verdict

__all__ = [
    "ConnectionIngest",
    "ConnectionRecords",
    "LocalConnectionRecords",
    "RecordEntry",
    "RecordsPage",
    "list_connections",
]

PAGE = 1000
PRUNED_AT_ONCE = 5000
BEYOND = "beyond the number of connections that is recorded of one sandbox"
_log = structlog.get_logger("cpuos.server.connections")
_rows = ConnectionRow.__table__
# A connection that ends: what was inserted at its start is completed.
_COMPLETE = (
    update(_rows)
    .where(_rows.c.source == bindparam("of_source"), _rows.c.connection == bindparam("of_connection"))
    .values(
        bytes_sent=bindparam("sent"),
        bytes_received=bindparam("received"),
        ended_at=bindparam("ended"),
        count=bindparam("times"),
    )
)


@dataclass(frozen=True, kw_only=True)
class RecordsPage:
    source: str
    entries: list[dict[str, Any]]
    next: int


class ConnectionRecords(Protocol):
    """The records worker of a node; one out of reach is `node_unavailable`."""

    async def page(self, after: int, *, limit: int) -> RecordsPage: ...

    async def aclose(self) -> None: ...


class LocalConnectionRecords:
    """Over the worker's unix socket."""

    def __init__(self, records_socket: Path | str, *, timeout_s: float = 10.0) -> None:
        self._socket = str(records_socket)
        # No TLS there, and to load whom it would trust takes longer than most calls.
        transport = httpx2.AsyncHTTPTransport(uds=self._socket, verify=False)
        self._http = httpx2.AsyncClient(
            transport=transport, base_url="http://records", timeout=timeout_s, trust_env=False
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def page(self, after: int, *, limit: int) -> RecordsPage:
        try:
            answer = await self._http.get("/v1/connections", params={"after": after, "limit": limit})
        except httpx2.TransportError as error:
            raise self._away(str(error) or type(error).__name__) from error
        decoded = read_answer(answer.status_code, answer.content, away=self._away)
        try:
            return RecordsPage(
                source=str(decoded["instance"]), entries=list(decoded["entries"]), next=int(decoded["next"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlatformError(
                "cannot read the records of connections: the answer lacks a field", str(error)
            ) from error

    def _away(self, why: str) -> Unavailable:
        what = "cannot read the records of connections"
        return Unavailable(what, f"{self._socket}: {why}", code="node_unavailable", hint="cpuos status")


class RecordEntry(Answer):
    """What the worker writes down. It reads guests' packets, so the workspace is that of the sandbox's record."""

    seq: int = Field(ge=0)
    at: datetime
    sandbox: str
    event: Literal["open", "closed", "refused", "gap"]
    connection: int = Field(ge=0)
    """Its number: of `closed` that of its `open`."""
    kind: ConnectionKind
    verdict: Verdict | None = None
    """Of a gap: what its connections were; of the others the event says it."""
    name: str | None = Field(None, max_length=253)
    address: str | None = Field(None, max_length=15)
    port: int | None = Field(None, ge=0, le=65535)
    rule: str = Field("", max_length=512)
    command: str | None = Field(None, max_length=16)
    count: int = Field(1, ge=1)
    bytes_sent: int | None = Field(None, ge=0, lt=1 << 63)
    bytes_received: int | None = Field(None, ge=0, lt=1 << 63)


class ConnectionIngest:
    def __init__(
        self,
        database: Database,
        records: ConnectionRecords,
        clock: Clock,
        *,
        most_of_a_sandbox: int,
        kept_s: float,
    ) -> None:
        self._database = database
        self._records = records
        self._clock = clock
        self._most = most_of_a_sandbox
        self._kept = timedelta(seconds=kept_s)
        self._source: str | None = None
        self._next = 0
        self.opened: Counter[str] = Counter()
        """By sandbox: the connections that were taken over since this process began, those beyond records too."""

    async def run(self) -> int:
        """Take over what is new; returns the number of entries."""
        taken = 0
        while True:
            page = await self._records.page(self._next, limit=PAGE)
            source = f"network:{page.source}"[:63]
            if source != self._source:
                # Another worker's journal than before: go on where that one was left.
                self._next = await cursor_of(self._database, source)
                self._source = source
                continue
            if not page.entries:
                return taken
            await self._store(page, source)
            taken += len(page.entries)
            self._next = page.next

    async def _store(self, page: RecordsPage, source: str) -> None:
        entries = [entry for raw in page.entries if (entry := _read(raw, source)) is not None]
        async with self._database.write() as connection:
            if not await take_cursor(connection, source, expected=self._next, following=page.next):
                self._source = None  # another reader was here: look up the cursor again
                return
            owners = {row.id: row for row in await find_sandboxes(connection, {entry.sandbox for entry in entries})}
            known = await _count(connection, list(owners))
            beyond: Counter[tuple[str, Verdict]] = Counter()
            for entry in entries:
                owner = owners.get(entry.sandbox)
                if owner is None:
                    _log.warning("connection of an unknown sandbox", sandbox=entry.sandbox, seq=entry.seq)
                elif entry.event == "closed" and await _complete(connection, entry, source=source):
                    continue
                elif known[entry.sandbox] < self._most:
                    known[entry.sandbox] += 1
                    await _keep(connection, entry, workspace=owner.workspace, source=source)
                elif entry.event != "closed":  # its beginning was counted
                    beyond[entry.sandbox, _verdict(entry)] += entry.count
            for (sandbox, verdict), count in beyond.items():
                await self._note_beyond(connection, owners[sandbox], verdict=verdict, count=count)
        for entry in entries:
            if entry.event in ("open", "gap") and entry.sandbox in owners and _verdict(entry) is Verdict.ALLOWED:
                self.opened[entry.sandbox] += entry.count

    async def prune(self) -> None:
        """Drop records that are kept no longer; at most some thousand a call, so that nobody waits for it."""
        oldest = self._clock() - self._kept
        first = select(_rows.c.id, _rows.c.at).order_by(_rows.c.id).limit(PRUNED_AT_ONCE).subquery()
        old = select(first.c.id).where(first.c.at < oldest)
        async with self._database.read() as connection:
            if (await connection.execute(old.limit(1))).one_or_none() is None:
                return
        async with self._database.write() as connection:
            await connection.execute(delete(_rows).where(_rows.c.id.in_(old)))

    async def _note_beyond(self, connection: AsyncConnection, owner: Row[Any], *, verdict: Verdict, count: int) -> None:
        """One entry a sandbox and verdict counts all that is not recorded one by one."""
        source = f"beyond:{owner.id}:{verdict.value}"
        counted = update(_rows).where(_rows.c.source == source).values(count=_rows.c.count + count)
        if (await connection.execute(counted)).rowcount:
            return
        values = {
            "at": self._clock(),
            "workspace": owner.workspace,
            "sandbox": owner.id,
            "kind": ConnectionKind.GAP.value,
            "verdict": verdict.value,
            "rule": BEYOND,
            "count": count,
            "source": source,
            "connection": 0,
        }
        await connection.execute(insert(_rows).values(values))


async def list_connections(
    connection: AsyncConnection, workspace: str, *, sandbox: str, verdict: Verdict | None, after: int, limit: int
) -> ConnectionList:
    """In the order of their records; `next_after` pages on."""
    statement = select(*_rows.c).where(_rows.c.workspace == workspace, _rows.c.sandbox == sandbox, _rows.c.id > after)
    if verdict is not None:
        statement = statement.where(_rows.c.verdict == verdict.value)
    rows = (await connection.execute(statement.order_by(_rows.c.id).limit(limit + 1))).all()
    seen = [Connection.model_validate(row._mapping) for row in rows[:limit]]
    shown = await with_commands(connection, workspace, sandbox=sandbox, connections=seen)
    return ConnectionList(connections=shown, next_after=shown[-1].id if len(rows) > limit else None)


async def _count(connection: AsyncConnection, sandboxes: list[str]) -> Counter[str]:
    statement = select(_rows.c.sandbox, func.count()).where(_rows.c.sandbox.in_(sandboxes)).group_by(_rows.c.sandbox)
    return Counter({sandbox: count for sandbox, count in (await connection.execute(statement)).all()})


async def _complete(connection: AsyncConnection, entry: RecordEntry, *, source: str) -> bool:
    """Put the end of a connection to its beginning, if that is on record."""
    completed = {
        "of_source": source,
        "of_connection": entry.connection,
        "sent": entry.bytes_sent,
        "received": entry.bytes_received,
        "ended": entry.at,
        "times": entry.count,
    }
    return bool((await connection.execute(_COMPLETE, completed)).rowcount)


def _verdict(entry: RecordEntry) -> Verdict:
    return entry.verdict or (Verdict.REFUSED if entry.event == "refused" else Verdict.ALLOWED)


async def _keep(connection: AsyncConnection, entry: RecordEntry, *, workspace: str, source: str) -> None:
    values = {
        **entry.model_dump(include={"at", "sandbox", "command", "name", "address", "port", "rule", "count"}),
        "kind": ConnectionKind.GAP.value if entry.event == "gap" else entry.kind.value,
        "workspace": workspace,
        "verdict": _verdict(entry).value,
        "bytes_sent": entry.bytes_sent,
        "bytes_received": entry.bytes_received,
        "ended_at": entry.at if entry.event == "closed" else None,
        "source": source,
        "connection": entry.connection,
    }
    known = select(_rows.c.id).where(_rows.c.source == source, _rows.c.connection == entry.connection)
    if (await connection.execute(known)).one_or_none() is None:
        await connection.execute(insert(_rows).values(values))


def _read(raw: dict[str, Any], source: str) -> RecordEntry | None:
    try:
        return RecordEntry.model_validate(raw)
    except ValidationError as error:
        _log.error("record of a connection out of contract", source=source, entry=str(raw)[:500], error=str(error))
        return None
