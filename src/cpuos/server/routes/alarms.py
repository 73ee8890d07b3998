"""The workspace's rules of alarms."""

from __future__ import annotations

from cpuos.server.routes.called import Called, Plane
from cpuos.types.alarms import AlarmUpdate, WorkspaceAlarms

__all__ = ["get_workspace_alarms", "update_workspace_alarms"]


async def get_workspace_alarms(plane: Plane, call: Called) -> WorkspaceAlarms:
    """The rules that hold for every sandbox of the workspace: its own, and those of the installation."""
    return await plane.usage_alarms.get(call.actor.workspace)


async def update_workspace_alarms(body: AlarmUpdate, plane: Plane, call: Called) -> WorkspaceAlarms:
    """Replace the workspace's rules. They hold for sandboxes that are there too, beside their own; those of the
    installation stay. A rule may be written as a text: `cpu=90%/10m`, `sent=5GiB/1h:pause`."""
    call.detail["rules"] = [rule.text for rule in body.rules]
    await plane.usage_alarms.update(call.actor.workspace, body.rules)
    return await plane.usage_alarms.get(call.actor.workspace)
