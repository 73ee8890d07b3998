"""Records of published ports."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.db.models import PortRow

__all__ = ["close_port", "close_ports", "list_ports", "port_of", "publish_port", "withdraw_port"]

_rows = PortRow.__table__


async def port_of(connection: AsyncConnection, sandbox_id: str, port: int) -> Row[Any] | None:
    """The record, also of one that was closed."""
    where = (_rows.c.sandbox == sandbox_id, _rows.c.port == port)
    return (await connection.execute(select(*_rows.c).where(*where))).one_or_none()


async def publish_port(
    connection: AsyncConnection,
    sandbox_id: str,
    port: int,
    *,
    public: bool,
    public_until: datetime | None,
    host: str | None,
    actor: str,
    now: datetime,
) -> Row[Any]:
    """The record of an open port. One that is public stays so when it is asked for privately; one that was closed
    begins anew, with an epoch that tokens of before do not have."""
    found = await port_of(connection, sandbox_id, port)
    opened = {"public": public, "public_until": public_until, "host": host}
    if found is None:
        values = {"sandbox": sandbox_id, "port": port, "epoch": 1, "created_by": actor, "created_at": now, **opened}
        return (await connection.execute(insert(_rows).values(**values).returning(*_rows.c))).one()
    if found.closed_at is not None:
        changes = {"epoch": found.epoch + 1, "created_by": actor, "created_at": now, "closed_at": None, **opened}
    elif public:
        changes = opened
    else:
        return found
    where = (_rows.c.sandbox == sandbox_id, _rows.c.port == port)
    return (await connection.execute(update(_rows).where(*where).values(**changes).returning(*_rows.c))).one()


async def withdraw_port(
    connection: AsyncConnection, published: Row[Any], *, before: Row[Any] | None, now: datetime
) -> None:
    """Take back what `publish_port` wrote, since the gateway refused it; `before` is the record from before that.

    If nobody has changed it since. An epoch that has gone up stays so."""
    same = [_rows.c[name] == published._mapping[name] for name in ("sandbox", "port", "epoch", "public")]
    if before is not None and before.closed_at is None:
        changes = {"public": before.public, "public_until": before.public_until, "host": before.host}
    else:
        changes = {"closed_at": now, "public": False}
    await connection.execute(update(_rows).where(*same).values(**changes))


async def close_port(connection: AsyncConnection, row: Row[Any], *, now: datetime) -> None:
    """If it was not published anew since `row` was read."""
    where = (_rows.c.sandbox == row.sandbox, _rows.c.port == row.port, _rows.c.epoch == row.epoch)
    await connection.execute(update(_rows).where(*where).values(closed_at=now, public=False))


async def close_ports(connection: AsyncConnection, sandbox_id: str, *, now: datetime) -> None:
    """All of a sandbox: no token of before opens them again."""
    where = (_rows.c.sandbox == sandbox_id, _rows.c.closed_at.is_(None))
    await connection.execute(update(_rows).where(*where).values(closed_at=now, public=False))


async def list_ports(connection: AsyncConnection, sandbox_id: str) -> list[Row[Any]]:
    """Open ones, by number."""
    where = (_rows.c.sandbox == sandbox_id, _rows.c.closed_at.is_(None))
    return list((await connection.execute(select(*_rows.c).where(*where).order_by(_rows.c.port))).all())
