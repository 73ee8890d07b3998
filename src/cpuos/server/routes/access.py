"""The way into a sandbox: tickets for its gateway, and links to single files."""

from __future__ import annotations

from cpuos.server.routes.called import Called, Plane, Ref, find
from cpuos.server.states import unusable
from cpuos.types.link import Link, LinkCreate
from cpuos.types.sandbox import Access, SandboxState

__all__ = ["create_access", "create_link"]


async def create_access(ref: Ref, plane: Plane, call: Called) -> Access:
    """A fresh ticket for commands and files of a running sandbox."""
    row = await find(plane, call, ref)
    _demand_running(row.id, SandboxState(row.state), reason=row.reason, action="reach sandbox")
    return plane.access(row, actor=call.actor.id)


async def create_link(ref: Ref, body: LinkCreate, plane: Plane, call: Called) -> Link:
    """A URL that downloads one file without a key, until it expires or the sandbox ends."""
    row = await find(plane, call, ref)
    _demand_running(row.id, SandboxState(row.state), reason=row.reason, action="make a link")
    call.detail |= {"path": body.path}
    url, expires_at = plane.tickets.link(
        data_url=plane.data_url(),
        workspace=row.workspace,
        sandbox=row.id,
        generation=row.generation,
        actor=call.actor.id,
        path=body.path,
        expires_s=body.expires_s,
    )
    return Link(url=url, expires_at=expires_at)


def _demand_running(sandbox_id: str, state: SandboxState, *, reason: str, action: str) -> None:
    if state is not SandboxState.RUNNING:
        raise unusable(sandbox_id, state, reason=reason, action=action)
