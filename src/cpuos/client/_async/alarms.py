"""The workspace's alarms."""

from __future__ import annotations

from collections.abc import Sequence

from cpuos.client._async.connection import AsyncServer
from cpuos.client._parse import make_request, parse_answer
from cpuos.types.alarms import AlarmUpdate, WorkspaceAlarms

__all__ = ["AsyncAlarmAccess"]

_PATH = "/v1/workspace/alarms"


class AsyncAlarmAccess:
    """`client.alarms`: what any sandbox of the workspace may use for a while, and what becomes of it then."""

    def __init__(self, server: AsyncServer) -> None:
        self._server = server

    async def get(self) -> WorkspaceAlarms:
        """The rules of the workspace, and those of the installation, which hold beside them."""
        return parse_answer(WorkspaceAlarms, (await self._server.call("GET", _PATH)).body)

    async def update(self, rules: Sequence[str]) -> WorkspaceAlarms:
        """Replace the workspace's rules, such as ["cpu=90%/10m", "sent=5GiB/1h:pause"]; none: []. They hold for all
        sandboxes within some seconds. Needs a key with the permission `workspace.write`."""
        body = make_request(AlarmUpdate, {"rules": rules}, doing="update the workspace's alarms")
        return parse_answer(WorkspaceAlarms, (await self._server.call("PUT", _PATH, content=body)).body)
