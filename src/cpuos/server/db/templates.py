"""Records of templates that workspaces have built, and of their builds."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.db.models import BuildRow, SandboxRow, SnapshotRow, TemplateRow
from cpuos.types.sandbox import LIVE_STATES
from cpuos.types.snapshot import SnapshotState
from cpuos.types.template import Build, BuildState, TemplateInfo

__all__ = [
    "build_of",
    "delete_template",
    "insert_build",
    "list_templates",
    "live_sandboxes_on",
    "named_images",
    "open_builds",
    "put_template",
    "template_of",
    "template_with_key",
    "update_build",
]

_templates = TemplateRow.__table__
_builds = BuildRow.__table__
_sandboxes = SandboxRow.__table__
_snapshots = SnapshotRow.__table__
_KEPT = [state.value for state in (SnapshotState.CREATING, SnapshotState.READY)]
_LIVE = [state.value for state in LIVE_STATES]
_OPEN = [state.value for state in BuildState if not state.ended]


async def template_of(connection: AsyncConnection, workspace: str, name: str) -> Row[Any] | None:
    where = (_templates.c.workspace == workspace, _templates.c.name == name)
    return (await connection.execute(select(*_templates.c).where(*where))).one_or_none()


async def template_with_key(connection: AsyncConnection, workspace: str, key: str) -> Row[Any] | None:
    """One of the workspace's whose image was made of exactly this."""
    where = (_templates.c.workspace == workspace, _templates.c.key == key)
    return (await connection.execute(select(*_templates.c).where(*where).limit(1))).one_or_none()


async def list_templates(connection: AsyncConnection, workspace: str) -> list[Row[Any]]:
    statement = select(*_templates.c).where(_templates.c.workspace == workspace).order_by(_templates.c.name)
    return list((await connection.execute(statement)).all())


async def put_template(connection: AsyncConnection, *, workspace: str, image: str, template: TemplateInfo) -> None:
    """Let the name mean this image from now on."""
    await delete_template(connection, workspace, template.name)
    values = {"workspace": workspace, "name": template.name, "image": image, "key": template.key}
    await connection.execute(insert(_templates).values(**values, manifest=template.model_dump(mode="json")))


async def delete_template(connection: AsyncConnection, workspace: str, name: str) -> None:
    where = (_templates.c.workspace == workspace, _templates.c.name == name)
    await connection.execute(delete(_templates).where(*where))


async def named_images(connection: AsyncConnection) -> set[str]:
    """Images that some name means, in whatever workspace, and those of live sandboxes and of snapshots that users
    made: what a build keeps for the next is not worth an image that nobody can build on."""
    named = (await connection.execute(select(_templates.c.image).distinct())).scalars()
    where = (_sandboxes.c.image.is_not(None), _sandboxes.c.state.in_(_LIVE))
    used = (await connection.execute(select(_sandboxes.c.image).where(*where).distinct())).scalars()
    where = (_snapshots.c.image.is_not(None), _snapshots.c.state.in_(_KEPT), _snapshots.c.internal.is_(False))
    saved = (await connection.execute(select(_snapshots.c.image).where(*where).distinct())).scalars()
    return {*named, *used, *saved}


async def live_sandboxes_on(connection: AsyncConnection, image: str) -> list[str]:
    """Ids of those that were started from it."""
    where = (_sandboxes.c.image == image, _sandboxes.c.state.in_(_LIVE))
    statement = select(_sandboxes.c.id).where(*where).order_by(_sandboxes.c.created_at)
    return list((await connection.execute(statement)).scalars())


async def insert_build(connection: AsyncConnection, build: Build, *, workspace: str, created_at: datetime) -> None:
    values = {"id": build.id, "workspace": workspace, "created_at": created_at, **_build_values(build)}
    await connection.execute(insert(_builds).values(**values))


async def update_build(connection: AsyncConnection, build: Build) -> None:
    await connection.execute(update(_builds).where(_builds.c.id == build.id).values(**_build_values(build)))


async def build_of(connection: AsyncConnection, workspace: str, build_id: str) -> Build | None:
    where = (_builds.c.workspace == workspace, _builds.c.id == build_id)
    found = (await connection.execute(select(_builds.c.build).where(*where))).scalar_one_or_none()
    return None if found is None else Build.model_validate(found)


async def open_builds(connection: AsyncConnection, *, except_for: Collection[str] = ()) -> list[Build]:
    """Builds that have not ended, as far as the records know."""
    rows = (await connection.execute(select(_builds.c.build).where(_builds.c.state.in_(_OPEN)))).scalars()
    return [build for found in rows if (build := Build.model_validate(found)).id not in except_for]


def _build_values(build: Build) -> dict[str, Any]:
    values = build.model_dump(mode="json", by_alias=True)
    return {"sandbox": build.sandbox, "state": build.state.value, "build": values}
