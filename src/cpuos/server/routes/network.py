"""Network policies of sandboxes and of the workspace, and the record of connections."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query

from cpuos.server.allow_lists import check_allow_list
from cpuos.server.connections import list_connections
from cpuos.server.routes.called import Called, Plane, Ref, find
from cpuos.types.network import ConnectionList, NetworkPolicy, SandboxNetwork, Verdict, WorkspaceNetwork

__all__ = [
    "get_sandbox_network",
    "get_workspace_network",
    "list_sandbox_connections",
    "update_sandbox_network",
    "update_workspace_network",
]


async def get_sandbox_network(ref: Ref, plane: Plane, call: Called) -> SandboxNetwork:
    """The sandbox's own policy, its workspace's, and whether the newest version of both holds already."""
    return await plane.networks.describe(await find(plane, call, ref))


async def update_sandbox_network(ref: Ref, body: NetworkPolicy, plane: Plane, call: Called) -> SandboxNetwork:
    """Replace the sandbox's policy, and answer when it holds and connections that it forbids are cut."""
    row = await find(plane, call, ref)
    check_allow_list(body, exemptions=plane.options.network_exceptions)
    call.detail |= body.model_dump(mode="json")
    return await plane.networks.describe(await plane.networks.update_sandbox(row, body))


async def get_workspace_network(plane: Plane, call: Called) -> WorkspaceNetwork:
    return WorkspaceNetwork(policy=await plane.networks.workspace_policy(call.actor.workspace))


async def update_workspace_network(body: NetworkPolicy, plane: Plane, call: Called) -> WorkspaceNetwork:
    """Replace the policy that holds for every sandbox of the workspace beside its own; answer when it holds."""
    check_allow_list(body, exemptions=plane.options.network_exceptions)
    call.detail |= body.model_dump(mode="json")
    await plane.networks.update_workspace(call.actor.workspace, body)
    return WorkspaceNetwork(policy=body)


async def list_sandbox_connections(
    ref: Ref,
    plane: Plane,
    call: Called,
    verdict: Annotated[Verdict | None, Query(description="Only these.")] = None,
    after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> ConnectionList:
    """Outbound connections of the sandbox, allowed and refused, in the order in which they were seen from outside."""
    row = await find(plane, call, ref)
    await asyncio.gather(plane.take_connections(), plane.take_journal())  # the journal says which command ran
    async with plane.database.read() as connection:
        return await list_connections(
            connection, row.workspace, sandbox=row.id, verdict=verdict, after=after, limit=limit
        )
