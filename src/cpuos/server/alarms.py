"""What nodes tell of themselves that somebody should hear: in the audit when it begins and ends, and in the health."""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from sqlalchemy import select

from cpuos.scheduler.base import NodeView, Scheduler
from cpuos.server.audit import SYSTEM, Audit
from cpuos.server.db.database import Database
from cpuos.server.db.models import Workspace
from cpuos.types.audit import AuditResult
from cpuos.types.node import VolumeFacts

__all__ = ["Alarms", "current_alarms"]

_log = structlog.get_logger("cpuos.server")


def current_alarms(views: Iterable[NodeView]) -> list[str]:
    """One sentence each."""
    return [
        f"the data volume of node {view.facts.node} is full: its sandboxes stand still until there is room on it"
        for view in views
        if view.facts.volume is not None and view.facts.volume.full
    ]


class Alarms:
    def __init__(self, *, database: Database, scheduler: Scheduler, audit: Audit) -> None:
        self._database = database
        self._scheduler = scheduler
        self._audit = audit
        self._known: dict[str, tuple[bool, int]] = {}
        """Of each node: whether its volume is full, and how often it was."""

    async def look(self) -> None:
        """Write down what has changed since the last look, for every workspace: all have sandboxes there or may."""
        for view in self._scheduler.nodes():
            volume = view.facts.volume
            if volume is None:
                continue
            now, before = (volume.full, volume.times_full), self._known.get(view.facts.node)
            if now != before and (volume.full or (before is not None and volume.times_full > 0)):
                await self._note(view.facts.node, volume)
            self._known[view.facts.node] = now

    async def _note(self, node: str, volume: VolumeFacts) -> None:
        _log.warning("data volume of a node", node=node, full=volume.full, free_bytes=volume.free_bytes)
        result = AuditResult.ERROR if volume.full else AuditResult.OK
        what = "it is full: sandboxes stand still" if volume.full else "it was full, and has room again"
        detail = {"what": what, "free_bytes": volume.free_bytes, "times_full": volume.times_full}
        async with self._database.write() as connection:
            for workspace in (await connection.execute(select(Workspace.id))).scalars().all():
                await self._audit.note(
                    connection,
                    workspace=workspace,
                    actor=SYSTEM,
                    action="node.volume",
                    target=node,
                    sandbox=None,
                    result=result,
                    detail=detail,
                )
