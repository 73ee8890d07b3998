"""What every handler can ask for: the control plane, and the call that guard let through."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Request
from sqlalchemy import Row

from cpuos.server.control_plane import ControlPlane
from cpuos.server.db.sandboxes import resolve
from cpuos.server.guard import Call

__all__ = ["Called", "Plane", "Ref", "find"]


async def _plane(request: Request) -> ControlPlane:
    return request.app.state.plane


async def _called(request: Request) -> Call:
    return request.state.call


Plane = Annotated[ControlPlane, Depends(_plane)]
Called = Annotated[Call, Depends(_called)]
Ref = Annotated[
    str,
    Path(min_length=1, max_length=63, description="A sandbox's id, its name, or a unique prefix of 4 letters or more."),
]


async def find(plane: ControlPlane, call: Call, ref: str) -> Row[Any]:
    """The sandbox of the caller's workspace that `ref` means."""
    async with plane.database.read() as connection:
        row = await resolve(connection, call.actor.workspace, ref)
    call.sandbox = row.id
    return row
