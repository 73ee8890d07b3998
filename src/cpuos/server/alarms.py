"""What nodes tell of themselves that somebody should hear: in the audit when it begins and ends, and in the health."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import structlog
from sqlalchemy import select

from cpuos.scheduler.base import NodeView, Scheduler
from cpuos.server.audit import SYSTEM, Audit
from cpuos.server.db.database import Database
from cpuos.server.db.models import Workspace
from cpuos.types.audit import AuditResult
from cpuos.types.node import PressureFacts, PressureLevel, VolumeFacts

__all__ = ["Alarms", "current_alarms"]

_log = structlog.get_logger("cpuos.server")


_STEPS = {
    PressureLevel.NONE: "that is over",
    PressureLevel.SHRINK_POOL: "ready sandboxes are given up",
    PressureLevel.PAUSE_IDLE: "idle sandboxes are paused",
    PressureLevel.REFUSE_NEW: "idle sandboxes are paused, and nothing new is taken",
}


def current_alarms(views: Iterable[NodeView]) -> list[str]:
    """One sentence each."""
    alarms = []
    for view in views:
        node, volume, pressure = view.facts.node, view.facts.volume, view.facts.pressure
        if volume is not None and volume.full:
            alarms.append(
                f"the data volume of node {node} is full: its sandboxes stand still until there is room on it"
            )
        if pressure.level is not PressureLevel.NONE:
            alarms.append(f"node {node} is short of memory: {_STEPS[pressure.level]} ({pressure.why})")
    return alarms


class Alarms:
    def __init__(self, *, database: Database, scheduler: Scheduler, audit: Audit) -> None:
        self._database = database
        self._scheduler = scheduler
        self._audit = audit
        self._known: dict[str, tuple[bool, int]] = {}
        """Of each node: whether its volume is full, and how often it was."""
        self._pressure: dict[str, PressureLevel] = {}

    async def look(self) -> None:
        """Write down what has changed since the last look, for every workspace: all have sandboxes there or may."""
        for view in self._scheduler.nodes():
            await self._look_at_volume(view.facts.node, view.facts.volume)
            await self._look_at_memory(view.facts.node, view.facts.pressure)

    async def _look_at_volume(self, node: str, volume: VolumeFacts | None) -> None:
        if volume is None:
            return
        now, before = (volume.full, volume.times_full), self._known.get(node)
        if now != before and (volume.full or (before is not None and volume.times_full > 0)):
            _log.warning("data volume of a node", node=node, full=volume.full, free_bytes=volume.free_bytes)
            what = "it is full: sandboxes stand still" if volume.full else "it was full, and has room again"
            detail = {"what": what, "free_bytes": volume.free_bytes, "times_full": volume.times_full}
            await self._note(node, "node.volume", bad=volume.full, detail=detail)
        self._known[node] = now

    async def _look_at_memory(self, node: str, pressure: PressureFacts) -> None:
        level = pressure.level
        if level is not self._pressure.get(node, PressureLevel.NONE):
            _log.warning("memory of a node", node=node, level=level, why=pressure.why)
            detail = {"level": level.value, "what": _STEPS[level], "why": pressure.why}
            await self._note(node, "node.pressure", bad=level is not PressureLevel.NONE, detail=detail)
        self._pressure[node] = level

    async def _note(self, node: str, action: str, *, bad: bool, detail: dict[str, Any]) -> None:
        async with self._database.write() as connection:
            for workspace in (await connection.execute(select(Workspace.id))).scalars().all():
                await self._audit.note(
                    connection,
                    workspace=workspace,
                    actor=SYSTEM,
                    action=action,
                    target=node,
                    sandbox=None,
                    result=AuditResult.ERROR if bad else AuditResult.OK,
                    detail=detail,
                )
