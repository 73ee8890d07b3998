"""Snapshot records."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import Conflict, NotFound
from cpuos.server.audit import SYSTEM
from cpuos.server.db.models import SnapshotRow
from cpuos.server.db.sandboxes import MIN_PREFIX
from cpuos.types.snapshot import Snapshot, SnapshotState

__all__ = [
    "all_snapshots",
    "change_snapshot",
    "count_snapshots",
    "insert_snapshot",
    "list_snapshots",
    "remove_snapshot",
    "rescued_snapshot",
    "resolve_snapshot",
    "snapshot_of",
]

_rows = SnapshotRow.__table__
_KEPT = (SnapshotState.CREATING.value, SnapshotState.READY.value)


async def insert_snapshot(connection: AsyncConnection, values: Mapping[str, Any]) -> Row[Any]:
    return (await connection.execute(insert(_rows).values(**values).returning(*_rows.c))).one()


async def change_snapshot(
    connection: AsyncConnection, row: Row[Any], *, state: SnapshotState, now: datetime, **changes: Any
) -> Row[Any] | None:
    """Change the state, if the record is still in the state of `row`; None when it is not."""
    statement = update(_rows).where(_rows.c.id == row.id, _rows.c.state == row.state)
    values = {"state": state.value, "changed_at": now, **changes}
    return (await connection.execute(statement.values(**values).returning(*_rows.c))).one_or_none()


async def remove_snapshot(connection: AsyncConnection, snapshot_id: str) -> None:
    await connection.execute(delete(_rows).where(_rows.c.id == snapshot_id))


async def list_snapshots(
    connection: AsyncConnection, workspace: str, *, sandbox: str | None, limit: int
) -> Sequence[Row[Any]]:
    """Newest first."""
    statement = select(*_rows.c).where(_rows.c.workspace == workspace, _rows.c.internal.is_(False))
    if sandbox is not None:
        statement = statement.where(_rows.c.sandbox == sandbox)
    ordered = statement.order_by(_rows.c.created_at.desc(), _rows.c.id).limit(limit)
    return (await connection.execute(ordered)).all()


async def all_snapshots(connection: AsyncConnection) -> Sequence[Row[Any]]:
    """Of all workspaces: for the reconciler."""
    return (await connection.execute(select(*_rows.c))).all()


async def rescued_snapshot(connection: AsyncConnection, row: Row[Any]) -> Row[Any] | None:
    """What was kept of a sandbox when it was lost, as its record has it; also after tries to make it anew."""
    mine = (_rows.c.sandbox == row.id, _rows.c.created_by == SYSTEM, _rows.c.state == SnapshotState.READY.value)
    statement = select(*_rows.c).where(*mine, _rows.c.created_at >= (row.lost_at or row.changed_at))
    return (await connection.execute(statement.order_by(_rows.c.created_at))).first()


async def count_snapshots(connection: AsyncConnection, workspace: str) -> int:
    mine = (_rows.c.workspace == workspace, _rows.c.state.in_(_KEPT), _rows.c.internal.is_(False))
    return (await connection.execute(select(func.count()).select_from(_rows).where(*mine))).scalar_one()


async def resolve_snapshot(connection: AsyncConnection, workspace: str, ref: str) -> Row[Any]:
    """The snapshot that an id, a name or a unique prefix of an id means."""
    matches = [_rows.c.id == ref, _rows.c.name == ref]
    if len(ref) >= MIN_PREFIX:
        matches.append(_rows.c.id.startswith(ref, autoescape=True))
    mine = (_rows.c.workspace == workspace, _rows.c.internal.is_(False), or_(*matches))
    rows = (await connection.execute(select(*_rows.c).where(*mine).order_by(_rows.c.created_at.desc()))).all()
    for group in (_with_id(rows, ref), _kept(rows, ref), rows):
        if len(group) == 1:
            return group[0]
        if group:
            raise Conflict(
                f"cannot tell which snapshot {ref!r} is",
                f"it is the start of {len(group)} ids",
                code="name_ambiguous",
                hint="use more letters of the id; cpuos snapshots ls",
            )
    raise NotFound(
        f"cannot find snapshot {ref!r}",
        f"no snapshot of this workspace has that id or name, nor an id that starts so ({MIN_PREFIX} letters or more)",
        code="snapshot_not_found",
        hint="cpuos snapshots ls",
    )


def snapshot_of(row: Row[Any]) -> Snapshot:
    """The record as it crosses the wire."""
    return Snapshot.model_validate(row._mapping)


def _with_id(rows: Collection[Row[Any]], ref: str) -> list[Row[Any]]:
    return [row for row in rows if row.id == ref]


def _kept(rows: Collection[Row[Any]], ref: str) -> list[Row[Any]]:
    return [row for row in rows if row.name == ref and row.state in _KEPT]
