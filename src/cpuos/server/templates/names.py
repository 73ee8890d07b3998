"""What a template's name means to a workspace: an installed template, or the image of one of its own builds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from cpuos.errors import Conflict, NotFound
from cpuos.scheduler.base import Scheduler
from cpuos.server.db import templates as records
from cpuos.server.db.database import Database
from cpuos.types.near import near_details
from cpuos.types.node import TemplateFacts
from cpuos.types.template import BUILT_IMAGE_PATTERN, TemplateInfo

__all__ = ["Meaning", "TemplateNames"]


@dataclass(frozen=True, kw_only=True)
class Meaning:
    name: str
    image: str | None
    """The node's name of the image; None: an installed template, whose name it is."""
    template: TemplateInfo | None = None
    """The manifest of a built one."""

    @property
    def on_node(self) -> str:
        """What the node calls it."""
        return self.image or self.name


class TemplateNames:
    def __init__(self, database: Database, scheduler: Scheduler) -> None:
        self._database = database
        self._scheduler = scheduler

    async def resolve(self, workspace: str, name: str, *, origin: Row[Any] | None = None) -> Meaning:
        """Without a look at the node: whether that has the image is found out by who asks it for a sandbox.

        A snapshot, `origin`, keeps to the image of its own sandbox, whatever the name means by now.
        """
        if origin is not None:
            return Meaning(name=origin.template, image=origin.image)
        if re.match(BUILT_IMAGE_PATTERN, name):
            raise _not_found(name)  # an image's own name would open other workspaces' too
        if any(facts.name == name for facts in self.installed()):
            return Meaning(name=name, image=None)
        async with self._database.read() as connection:
            row = await records.template_of(connection, workspace, name)
        if row is None:
            return Meaning(name=name, image=None)
        return Meaning(name=name, image=row.image, template=TemplateInfo.model_validate(row.manifest))

    async def get(self, workspace: str, name: str) -> TemplateInfo:
        """Its manifest."""
        meaning = await self.resolve(workspace, name)
        if meaning.template is not None:
            return meaning.template
        for facts in self.installed():
            if facts.name == name:
                return TemplateInfo(name=name, digest=facts.digest, size_bytes=facts.size_bytes, built=False)
        raise _not_found(name, [facts.name for facts in await self.list(workspace)])

    async def list(self, workspace: str) -> list[TemplateFacts]:
        """Installed ones and the workspace's own."""
        async with self._database.read() as connection:
            rows = await records.list_templates(connection, workspace)
        listed = {facts.name: facts for facts in map(_facts, rows)} | {facts.name: facts for facts in self.installed()}
        return [listed[name] for name in sorted(listed)]

    def installed(self) -> list[TemplateFacts]:
        """Those of the installation, as the nodes told last."""
        return [facts for view in self._scheduler.nodes() for facts in view.facts.templates if not facts.built]

    def images(self) -> dict[str, TemplateFacts]:
        """Images of builds on the nodes, as these told last."""
        found = (facts for view in self._scheduler.nodes() for facts in view.facts.templates if facts.built)
        return {facts.name: facts for facts in found}

    async def remove(self, workspace: str, name: str) -> TemplateInfo:
        """Forget the name; refused while sandboxes live on its image. The image itself goes when no name means it."""
        template = await self.get(workspace, name)
        if not template.built:
            raise Conflict(
                f"cannot remove template: {name!r} came with the installation",
                "it is for all workspaces",
                hint="cpuos template ls",
            )
        async with self._database.write() as connection:
            row = await records.template_of(connection, workspace, name)
            if row is None:
                raise _not_found(name)
            users = await records.live_sandboxes_on(connection, row.image)
            if users:
                raise Conflict(
                    f"cannot remove template: {name!r} is in use",
                    f"{len(users)} live sandboxes were started from it: {', '.join(users[:5])}",
                    code="template_in_use",
                    hint=f"cpuos kill {users[0]}",
                    details={"sandboxes": users[:100]},
                )
            await records.delete_template(connection, workspace, name)
        return template


def _facts(row: Row[Any]) -> TemplateFacts:
    manifest = TemplateInfo.model_validate(row.manifest)
    return TemplateFacts(name=row.name, digest=manifest.digest, size_bytes=manifest.size_bytes, built=True)


def _not_found(name: str, known: Sequence[str] = ()) -> NotFound:
    near = near_details(name, known)
    return NotFound(
        f"cannot find template: {name!r}",
        "this workspace has none of that name, nor has the installation"
        + (f"; {near['near']!r} is near" if near else ""),
        code="template_not_found",
        hint=f"cpuos template inspect {near['near']}" if near else "cpuos template ls",
        details=near,
    )
