"""Templates: list, inspect, remove, and the builds that make them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from cpuos.server.routes.called import Called, Plane
from cpuos.server.routes.installation import views
from cpuos.types.installation import TemplateList
from cpuos.types.template import Build, BuildCreated, BuildUpdate, TemplateBuild, TemplateInfo

__all__ = [
    "create_build",
    "delete_build",
    "delete_template",
    "get_build",
    "get_template",
    "list_templates",
    "update_build",
]

Name = Annotated[str, Path(min_length=1, max_length=63, description="A template's name.")]
BuildId = Annotated[str, Path(min_length=1, max_length=63, description="A build's id.")]


async def list_templates(plane: Plane, call: Called) -> TemplateList:
    """Those of the installation, and those that the workspace has built."""
    await views(plane)
    return TemplateList(templates=await plane.templates.list(call.actor.workspace))


async def get_template(name: Name, plane: Plane, call: Called) -> TemplateInfo:
    """What it is made of."""
    await views(plane)
    return await plane.templates.get(call.actor.workspace, name)


async def delete_template(name: Name, plane: Plane, call: Called) -> TemplateInfo:
    """Refused while live sandboxes were started from it. Other names of the same image stay."""
    call.detail["template"] = name
    await views(plane)
    template = await plane.templates.remove(call.actor.workspace, name)
    await plane.builder.tidy()
    return template


async def create_build(body: TemplateBuild, plane: Plane, call: Called) -> BuildCreated:
    """Build a template in a sandbox of its own. Answers at once: `ready` when the same was built before.

    With `files` the build waits for them in the state `uploading`: put each to its path in the sandbox, as root, with
    the ticket that comes along, then say `uploaded`.
    """
    call.detail |= {"template": body.name, "from": body.from_}
    actor = call.actor
    await plane.refresh_nodes()
    build, row = await plane.builder.create(body, workspace=actor.workspace, actor=actor.id, begun=call.begin)
    call.detail |= {"build": build.id, "reused": build.reused}
    return BuildCreated(build=build, access=None if row is None else plane.access(row, actor=actor.id))


async def get_build(build: BuildId, plane: Plane, call: Called) -> Build:
    """How far it is. A step's output is that of its command in the build sandbox, also after the sandbox's end."""
    return await plane.builder.get(call.actor.workspace, build)


async def update_build(build: BuildId, body: BuildUpdate, plane: Plane, call: Called) -> Build:
    """Let it run: its files are uploaded. Nothing changes when it has started already."""
    call.detail["build"] = build
    return await plane.builder.uploaded(call.actor.workspace, build)


async def delete_build(build: BuildId, plane: Plane, call: Called) -> Build:
    """End it, and answer when nothing of it is left. One that has ended stays as it is."""
    call.detail["build"] = build
    return await plane.builder.cancel(call.actor.workspace, build, by=call.actor.shown)
