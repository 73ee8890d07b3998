"""The way into a sandbox: tickets for its gateway, and links to single files."""

from __future__ import annotations

from cpuos.errors import OutputLost
from cpuos.server.routes.called import Called, Plane, Ref, find
from cpuos.server.states import REACHABLE_STATES, unusable
from cpuos.types.link import Link, LinkCreate
from cpuos.types.sandbox import Access, SandboxState

__all__ = ["create_access", "create_link"]

WITH_RECORD = (SandboxState.STOPPED, SandboxState.LOST)


async def create_access(ref: Ref, plane: Plane, call: Called) -> Access:
    """A fresh ticket: for commands and files of a sandbox that runs or is paused, or to read what an ended one left."""
    row = await find(plane, call, ref)
    if SandboxState(row.state) not in WITH_RECORD:
        _demand_reachable(row.id, SandboxState(row.state), reason=row.reason, action="reach sandbox")
    elif row.gateway_stage == "forgotten":
        raise OutputLost(
            f"cannot read the record of sandbox {row.id}: it ended too long ago",
            "the record of an ended sandbox is kept for the time of the setting record_retention_s",
            hint=f"cpuos audit --sandbox {row.id}",
        )
    return plane.access(row, actor=call.actor.id)


async def create_link(ref: Ref, body: LinkCreate, plane: Plane, call: Called) -> Link:
    """A URL that downloads one file without a key, until it expires or the sandbox ends."""
    row = await find(plane, call, ref)
    _demand_reachable(row.id, SandboxState(row.state), reason=row.reason, action="make a link")
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


def _demand_reachable(sandbox_id: str, state: SandboxState, *, reason: str, action: str) -> None:
    if state not in REACHABLE_STATES:
        raise unusable(sandbox_id, state, reason=reason, action=action)
