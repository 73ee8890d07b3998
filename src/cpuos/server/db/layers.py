"""Records of what the steps of builds have left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.db.models import LayerRow, SnapshotRow, TemplateRow
from cpuos.types.snapshot import SnapshotState

__all__ = [
    "all_layers",
    "drop_layers",
    "drop_stale_layers",
    "has_layer",
    "layer_snapshots",
    "layers_of",
    "put_layer",
    "ready_layers",
    "touch_layer",
]

_layers = LayerRow.__table__
_snapshots = SnapshotRow.__table__
_templates = TemplateRow.__table__
_MADE = [state.value for state in (SnapshotState.CREATING, SnapshotState.READY)]


async def ready_layers(connection: AsyncConnection, workspace: str, keys: Collection[str]) -> dict[str, Row[Any]]:
    """Snapshots that sandboxes can begin with, by the key of the layer."""
    mine = (_layers.c.workspace == workspace, _layers.c.key.in_(keys))
    joined = select(_layers.c.key.label("layer"), *_snapshots.c).join(_snapshots, _snapshots.c.id == _layers.c.snapshot)
    rows = await connection.execute(joined.where(*mine, _snapshots.c.state == SnapshotState.READY.value))
    return {row.layer: row for row in rows}


async def has_layer(connection: AsyncConnection, workspace: str, key: str) -> bool:
    """There is one, or it is being made."""
    mine = (_layers.c.workspace == workspace, _layers.c.key == key, _snapshots.c.state.in_(_MADE))
    joined = select(_layers.c.key).join(_snapshots, _snapshots.c.id == _layers.c.snapshot)
    return (await connection.execute(joined.where(*mine))).first() is not None


async def put_layer(connection: AsyncConnection, values: Mapping[str, Any]) -> None:
    """In the place of one that was there."""
    where = (_layers.c.workspace == values["workspace"], _layers.c.key == values["key"])
    await connection.execute(delete(_layers).where(*where))
    await connection.execute(insert(_layers).values(**values))


async def touch_layer(connection: AsyncConnection, workspace: str, key: str, *, now: datetime) -> None:
    where = (_layers.c.workspace == workspace, _layers.c.key == key)
    await connection.execute(update(_layers).where(*where).values(used_at=now))


async def layers_of(connection: AsyncConnection, workspace: str) -> Sequence[Row[Any]]:
    """With their sizes, the last used first."""
    columns = (_layers.c.key, _layers.c.snapshot, _layers.c.used_at, _snapshots.c.size_bytes)
    joined = select(*columns).join(_snapshots, _snapshots.c.id == _layers.c.snapshot, isouter=True)
    ordered = joined.where(_layers.c.workspace == workspace).order_by(_layers.c.used_at.desc(), _layers.c.key)
    return (await connection.execute(ordered)).all()


async def all_layers(connection: AsyncConnection) -> Sequence[Row[Any]]:
    """Of every workspace."""
    columns = (_layers.c.workspace, _layers.c.key, _layers.c.snapshot, _layers.c.used_at)
    return (await connection.execute(select(*columns).order_by(_layers.c.used_at))).all()


async def layer_snapshots(connection: AsyncConnection) -> set[str]:
    """Ids of snapshots that are layers, in whatever workspace."""
    return set((await connection.execute(select(_layers.c.snapshot))).scalars())


async def drop_layers(connection: AsyncConnection, workspace: str, snapshots: Collection[str]) -> None:
    """Their snapshots are nobody's then."""
    where = (_layers.c.workspace == workspace, _layers.c.snapshot.in_(snapshots))
    await connection.execute(delete(_layers).where(*where))


async def drop_stale_layers(connection: AsyncConnection, installed: Collection[str], *, unused_since: datetime) -> None:
    """Those on parents that neither the installation nor a name of their workspace has, those whose snapshot has
    failed, and those unused for long."""
    own = select(_templates.c.manifest["digest"].as_string()).where(_templates.c.workspace == _layers.c.workspace)
    alive = select(_snapshots.c.id).where(_snapshots.c.state.in_(_MADE))
    orphaned = _layers.c.parent_digest.not_in(installed) & _layers.c.parent_digest.not_in(own)
    stale = or_(orphaned, _layers.c.snapshot.not_in(alive), _layers.c.used_at < unused_since)
    await connection.execute(delete(_layers).where(stale))
