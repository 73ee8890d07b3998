# Generated from src/cpuos/client/_async/network.py by scripts/gen_sync.py; edit that.
"""A sandbox's network policy, and what it connected to."""

from __future__ import annotations

from urllib.parse import quote

from cpuos.client._parse import make_request, parse_answer
from cpuos.client._sync.connection import Server
from cpuos.client.network import Network, network_values
from cpuos.types.audit import AuditEntry, AuditList
from cpuos.types.network import (
    Connection,
    ConnectionList,
    NetworkPolicy,
    SandboxNetwork,
    Verdict,
    WorkspaceNetwork,
)

__all__ = ["NetworkAccess", "SandboxAudit", "WorkspaceAccess"]

PAGE = 1000
_WORKSPACE = "/v1/workspace/network"


class NetworkAccess:
    """`sbx.network`: what the sandbox may reach. The workspace's policy holds beside it."""

    def __init__(self, server: Server, *, sandbox_id: str) -> None:
        self._server = server
        self._path = f"/v1/sandboxes/{quote(sandbox_id, safe='')}/network"

    def get(self) -> SandboxNetwork:
        """The policy, that of the workspace, and whether both are in place."""
        return parse_answer(SandboxNetwork, (self._server.call("GET", self._path)).body)

    def update(self, network: str | Network) -> SandboxNetwork:
        """Replace the policy: "internet", "off" or a `Network`. Returns when it holds; what it forbids is cut."""
        body = make_request(NetworkPolicy, network_values(network), doing="update the network")
        return parse_answer(SandboxNetwork, (self._server.call("PUT", self._path, content=body)).body)


class WorkspaceAccess:
    """`client.network`: what all sandboxes of the workspace may reach at most, beside what their own policies say."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def get(self) -> WorkspaceNetwork:
        """The policy of the workspace."""
        return parse_answer(WorkspaceNetwork, (self._server.call("GET", _WORKSPACE)).body)

    def update(self, network: str | Network) -> WorkspaceNetwork:
        """Replace it: "internet", "off" or a `Network`. Returns when it holds for every sandbox; what it forbids is
        cut. Needs a key with the permission `workspace.write`."""
        body = make_request(NetworkPolicy, network_values(network), doing="update the workspace's network")
        return parse_answer(WorkspaceNetwork, (self._server.call("PUT", _WORKSPACE, content=body)).body)


class SandboxAudit:
    """`sbx.audit`: what the sandbox did and what was done to it, as seen from outside."""

    def __init__(self, server: Server, *, sandbox_id: str) -> None:
        self._server = server
        self._sandbox_id = sandbox_id

    def connections(self, *, verdict: str | Verdict | None = None) -> list[Connection]:
        """All outbound connections in order, or only the "allowed" or the "refused" ones."""
        path = f"/v1/sandboxes/{quote(self._sandbox_id, safe='')}/connections"
        found: list[Connection] = []
        after: int | None = 0
        while after is not None:
            query = {"verdict": verdict, "after": after, "limit": PAGE}
            page = parse_answer(ConnectionList, (self._server.call("GET", path, query=query)).body)
            found += page.connections
            after = page.next_after
        return found

    def entries(self, *, action: str | None = None) -> list[AuditEntry]:
        """All audit entries of the sandbox in order: an intent before each action, an outcome after it."""
        found: list[AuditEntry] = []
        after: int | None = 0
        while after is not None:
            query = {"sandbox": self._sandbox_id, "action": action, "after": after, "limit": PAGE}
            page = parse_answer(AuditList, (self._server.call("GET", "/v1/audit", query=query)).body)
            found += page.entries
            after = page.next_after
        return found
