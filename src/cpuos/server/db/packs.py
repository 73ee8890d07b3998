"""Records of data packs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.db.models import PackRow
from cpuos.types.pack import Pack

__all__ = ["all_pack_images", "delete_pack", "list_packs", "pack_of", "pack_row", "put_pack"]

_packs = PackRow.__table__


async def pack_row(connection: AsyncConnection, workspace: str, name: str) -> Row[Any] | None:
    where = (_packs.c.workspace == workspace, _packs.c.name == name)
    return (await connection.execute(select(*_packs.c).where(*where))).one_or_none()


async def list_packs(connection: AsyncConnection, workspace: str) -> list[Row[Any]]:
    statement = select(*_packs.c).where(_packs.c.workspace == workspace).order_by(_packs.c.name)
    return list((await connection.execute(statement)).all())


async def put_pack(connection: AsyncConnection, values: dict[str, Any]) -> None:
    """Let the name mean this pack from now on."""
    await delete_pack(connection, values["workspace"], values["name"])
    await connection.execute(insert(_packs).values(**values))


async def delete_pack(connection: AsyncConnection, workspace: str, name: str) -> None:
    await connection.execute(delete(_packs).where(_packs.c.workspace == workspace, _packs.c.name == name))


async def all_pack_images(connection: AsyncConnection) -> set[str]:
    """Those with a name, of all workspaces."""
    return set((await connection.execute(select(_packs.c.image))).scalars().all())


def pack_of(row: Row[Any]) -> Pack:
    """The record as it crosses the wire."""
    return Pack.model_validate(row._mapping)
