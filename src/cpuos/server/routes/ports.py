"""Published ports: the way to a server inside a sandbox."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import Path
from sqlalchemy import Row

from cpuos.errors import Conflict, InvalidRequest, LimitReached, NotFound, SandboxGone
from cpuos.server.control_plane import ControlPlane
from cpuos.server.db import ports as records
from cpuos.server.routes.called import Called, Plane, Ref, find
from cpuos.server.states import REACHABLE_STATES, unusable
from cpuos.types.port import Port, PortAccess, PortCreate, PortList
from cpuos.types.sandbox import SandboxState

__all__ = ["create_port", "delete_port", "list_ports"]

TOKEN_LIFE_S = 3600.0
Number = Annotated[int, Path(ge=1, le=65535)]


async def create_port(ref: Ref, body: PortCreate, plane: Plane, call: Called) -> PortAccess:
    """Publish a port of a running or paused sandbox, or give another token for one that is published.

    Whether something listens there does not matter yet. A public port stays public until it is closed.
    """
    row = await _running(ref, plane, call, action="publish a port")
    call.detail |= body.model_dump(exclude_none=True)
    now = plane.clock()
    until = None if body.expires_s is None else now + timedelta(seconds=body.expires_s)
    async with plane.database.write() as connection:
        before = await records.port_of(connection, row.id, body.port)
        published = await records.publish_port(
            connection,
            row.id,
            body.port,
            public=body.public,
            public_until=until if body.public else None,
            host=body.host if body.public else None,
            actor=call.actor.id,
            now=now,
        )
    try:
        await plane.gateway.open_port(
            row.id,
            port=body.port,
            epoch=published.epoch,
            generation=row.generation,
            public=published.public,
            public_until=published.public_until,
            host=published.host,
        )
    except (Conflict, InvalidRequest, LimitReached, NotFound, SandboxGone):
        # A no is final. Of a gateway that did not answer nobody knows: what may be open stays on the list.
        async with plane.database.write() as connection:
            await records.withdraw_port(connection, published, before=before, now=plane.clock())
        raise
    token = None
    if not body.public:
        until = now + timedelta(seconds=body.expires_s or TOKEN_LIFE_S)
        token = plane.tickets.preview(
            workspace=row.workspace,
            sandbox=row.id,
            generation=row.generation,
            actor=call.actor.id,
            port=body.port,
            epoch=published.epoch,
            host=body.host,
            expires_at=until,
        )
    url = plane.preview_url(row.id, body.port)
    return PortAccess(port=body.port, url=url, public=published.public, token=token, expires_at=until)


async def list_ports(ref: Ref, plane: Plane, call: Called) -> PortList:
    """Published ports; of a sandbox that has ended there are none."""
    return await _published(await find(plane, call, ref), plane)


async def delete_port(ref: Ref, port: Number, plane: Plane, call: Called) -> PortList:
    """Close a port: its URL opens nothing any more, no token given so far is good, and what is open is cut.

    Closing one that is not published changes nothing. Answers what is still published.
    """
    row = await find(plane, call, ref)
    call.detail |= {"port": port}
    async with plane.database.read() as connection:
        published = await records.port_of(connection, row.id, port)
    if published is not None:
        # The gateway first: should it be out of reach, the record still says that the port is open.
        await plane.gateway.close_port(row.id, port=port, epoch=published.epoch)
        async with plane.database.write() as connection:
            await records.close_port(connection, published, now=plane.clock())
    return await _published(row, plane)


async def _running(ref: str, plane: ControlPlane, call: Any, *, action: str) -> Row[Any]:
    row = await find(plane, call, ref)
    state = SandboxState(row.state)
    if state not in REACHABLE_STATES:
        raise unusable(row.id, state, reason=row.reason, action=action)
    return row


async def _published(row: Row[Any], plane: ControlPlane) -> PortList:
    if SandboxState(row.state) not in REACHABLE_STATES:
        return PortList(ports=[])
    async with plane.database.read() as connection:
        found = await records.list_ports(connection, row.id)
    now = plane.clock()
    return PortList(
        ports=[
            Port(
                port=one.port,
                url=plane.preview_url(row.id, one.port),
                public=one.public and (one.public_until is None or one.public_until > now),
                public_until=one.public_until,
                host=one.host,
                created_at=one.created_at,
                created_by=one.created_by,
            )
            for one in found
        ]
    )
