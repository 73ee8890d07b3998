"""What a workspace may have of builds and templates."""

from __future__ import annotations

from cpuos.errors import LimitReached
from cpuos.server.db import templates as records
from cpuos.server.db.database import Database

__all__ = ["MAX_BUILDS", "MAX_TEMPLATES", "TemplateRoom"]

MAX_BUILDS = 8
"""At once; each holds a sandbox, which has its own quota too."""
MAX_TEMPLATES = 200


class TemplateRoom:
    def __init__(self, database: Database, *, workspace_mib: int) -> None:
        self._database = database
        self._workspace_mib = workspace_mib

    async def check_counts(self, workspace: str, name: str, *, builds: int) -> None:
        """Before a build; `builds` are at work already."""
        if builds >= MAX_BUILDS:
            raise LimitReached(
                f"cannot build template: {builds} builds of this workspace are at work",
                f"{MAX_BUILDS} may be at once",
                hint="repeat when some have ended",
                details={"limit": "builds", "max": MAX_BUILDS},
            )
        async with self._database.read() as connection:
            rows = await records.list_templates(connection, workspace)
        if len(rows) >= MAX_TEMPLATES and all(row.name != name for row in rows):
            raise LimitReached(
                f"cannot build template: the workspace has {len(rows)} of its own",
                f"{MAX_TEMPLATES} may be there",
                hint="cpuos template rm NAME",
                details={"limit": "templates", "max": MAX_TEMPLATES},
            )

    async def check_size(self, workspace: str, name: str, *, size: int) -> None:
        """Before an image is stored. What the name means so far goes then, and does not count."""
        async with self._database.read() as connection:
            rows = await records.list_templates(connection, workspace)
        held = sum({row.image: row.manifest["size_bytes"] for row in rows if row.name != name}.values())
        if held + size > self._workspace_mib << 20:
            raise LimitReached(
                f"cannot build template {name!r}: the workspace's templates would be too large",
                f"{held >> 20} MiB are there, {size >> 20} MiB more, and {self._workspace_mib} MiB are allowed",
                hint="cpuos template rm NAME",
                details={"limit": "templates_size", "max_mib": self._workspace_mib},
            )
