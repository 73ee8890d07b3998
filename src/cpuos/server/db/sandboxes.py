"""Sandbox records, and the one function that changes their state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, Select, and_, bindparam, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import Conflict, NotFound
from cpuos.server.db.models import SandboxRow
from cpuos.server.states import TRANSITIONAL_STATES, Verb, next_state
from cpuos.types.sandbox import LIVE_STATES, Sandbox, SandboxState

__all__ = [
    "advance",
    "count_live",
    "due_rows",
    "find_sandboxes",
    "insert_sandbox",
    "list_sandboxes",
    "live_rows",
    "resolve",
    "row_of",
    "sandbox_of",
    "update_fields",
]

MIN_PREFIX = 4
_rows = SandboxRow.__table__
_INSERT = insert(_rows).returning(*_rows.c)
_LIVE = [state.value for state in LIVE_STATES]
_IN_BETWEEN = [state.value for state in TRANSITIONAL_STATES]
_SETTLED = [state.value for state in LIVE_STATES - TRANSITIONAL_STATES]
_OVER = and_(_rows.c.state.in_(_SETTLED), _rows.c.expires_at <= bindparam("now", type_=_rows.c.expires_at.type))
_DUE = select(*_rows.c).where(or_(_rows.c.state.in_(_IN_BETWEEN), _OVER))
_ONE = select(*_rows.c).where(_rows.c.id == bindparam("id"))


async def advance(
    connection: AsyncConnection, row: Row[Any], *, verb: Verb, now: datetime, **changes: Any
) -> Row[Any] | None:
    """Change the state, if the record is still in the state and generation of `row`; None when it is not.

    Every change of state goes through here. A verb that the table does not allow is a fault of the caller.
    """
    state = next_state(SandboxState(row.state), verb)
    if state is None:
        raise Conflict(f"cannot {verb.value} sandbox {row.id}: it is {row.state}", details={"state": row.state})
    values: dict[str, Any] = {"state": state.value, "changed_at": now, **changes}
    if state not in TRANSITIONAL_STATES:
        values.setdefault("deadline_at", None)
    if state not in LIVE_STATES:
        values.setdefault("ended_at", now)
    statement = (
        update(_rows)
        .where(_rows.c.id == row.id, _rows.c.state == row.state, _rows.c.generation == row.generation)
        .values(values)
        .returning(*_rows.c)
    )
    return (await connection.execute(statement)).one_or_none()


async def insert_sandbox(connection: AsyncConnection, values: Mapping[str, Any]) -> Row[Any]:
    return (await connection.execute(_INSERT, values)).one()


async def update_fields(connection: AsyncConnection, row: Row[Any], **changes: Any) -> Row[Any] | None:
    """Change fields that are no state, if state and generation are still those of `row`."""
    statement = (
        update(_rows)
        .where(_rows.c.id == row.id, _rows.c.state == row.state, _rows.c.generation == row.generation)
        .values(**changes)
        .returning(*_rows.c)
    )
    return (await connection.execute(statement)).one_or_none()


async def row_of(connection: AsyncConnection, sandbox_id: str) -> Row[Any] | None:
    return (await connection.execute(_ONE, {"id": sandbox_id})).one_or_none()


async def resolve(connection: AsyncConnection, workspace: str, ref: str) -> Row[Any]:
    """The sandbox that an id, a name or a unique prefix of an id means; live ones come before ended ones."""
    matches = [_rows.c.id == ref, _rows.c.name == ref]
    if len(ref) >= MIN_PREFIX:
        matches.append(_rows.c.id.startswith(ref, autoescape=True))
    statement = _select().where(_rows.c.workspace == workspace, or_(*matches))
    rows = (await connection.execute(statement.order_by(_rows.c.created_at.desc()))).all()
    live = [row for row in rows if row.state in _LIVE]
    for group in (
        [row for row in rows if row.id == ref],
        [row for row in live if row.name == ref],
        live,
        [row for row in rows if row.name == ref][:1],
        rows,
    ):
        if len(group) == 1:
            return group[0]
        if group:
            raise _ambiguous(ref, group)
    raise NotFound(
        f"cannot find sandbox {ref!r}",
        f"no sandbox of this workspace has that id or name, nor an id that starts so ({MIN_PREFIX} letters or more)",
        code="sandbox_not_found",
        hint="cpuos ls --all",
    )


async def list_sandboxes(
    connection: AsyncConnection,
    workspace: str,
    *,
    states: Collection[SandboxState],
    name: str | None,
    labels: Mapping[str, str],
    limit: int,
) -> Sequence[Row[Any]]:
    """Newest first."""
    statement = _select().where(_rows.c.workspace == workspace, _rows.c.state.in_([state.value for state in states]))
    if name is not None:
        statement = statement.where(_rows.c.name == name)
    for key, value in labels.items():
        statement = statement.where(_rows.c.labels[key].as_string() == value)
    statement = statement.order_by(_rows.c.created_at.desc(), _rows.c.id).limit(limit)
    return (await connection.execute(statement)).all()


async def live_rows(connection: AsyncConnection) -> Sequence[Row[Any]]:
    """The live sandboxes of all workspaces: for the reconciler and the scheduler."""
    return (await connection.execute(_select().where(_rows.c.state.in_(_LIVE)))).all()


async def due_rows(connection: AsyncConnection, *, now: datetime) -> Sequence[Row[Any]]:
    """The live sandboxes of all workspaces of which the clock alone may ask something: those between two states, and
    those whose time is over. Of a thousand that are known these are few."""
    return (await connection.execute(_DUE, {"now": now})).all()


async def find_sandboxes(connection: AsyncConnection, ids: Collection[str]) -> Sequence[Row[Any]]:
    return (await connection.execute(_select().where(_rows.c.id.in_(ids)))).all()


async def count_live(connection: AsyncConnection, workspace: str) -> int:
    statement = select(_rows.c.id).where(_rows.c.workspace == workspace, _rows.c.state.in_(_LIVE))
    return len((await connection.execute(statement)).all())


def sandbox_of(row: Row[Any]) -> Sandbox:
    """The record as it crosses the wire."""
    return Sandbox.model_validate(row._mapping)


def _select() -> Select[Any]:
    return select(*_rows.c)


def _ambiguous(ref: str, rows: Sequence[Row[Any]]) -> Conflict:
    ids = [row.id for row in rows[:10]]
    return Conflict(
        f"cannot tell which sandbox {ref!r} is",
        f"it is the start of {len(rows)} ids: {', '.join(ids)}",
        code="name_ambiguous",
        hint="use more letters of the id",
        details={"ids": ids},
    )
