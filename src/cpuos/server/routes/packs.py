"""Data packs: make one of a sandbox's folder, list, inspect, remove."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from cpuos.server.routes.called import Called, Plane, Ref, find
from cpuos.types.pack import Pack, PackCreate, PackList

__all__ = ["create_pack", "delete_pack", "get_pack", "list_packs"]

Name = Annotated[str, Path(min_length=1, max_length=63, description="A data pack's name.")]


async def create_pack(ref: Ref, body: PackCreate, plane: Plane, call: Called) -> Pack:
    """Make a read-only image of a folder of a running sandbox, for other sandboxes to have at a path of theirs.

    The sandbox makes it itself, and needs room for it outside of /workspace. A name that is there means the new one
    from now on; sandboxes that have the old one keep it.
    """
    row = await find(plane, call, ref)
    call.detail |= {"pack": body.name, "path": body.path}
    pack = await plane.packs.make(row, body, actor=call.actor.id)
    call.detail |= {"digest": pack.digest, "size_bytes": pack.size_bytes}
    return pack


async def list_packs(plane: Plane, call: Called) -> PackList:
    """Those of the workspace, by name."""
    return PackList(packs=await plane.packs.list(call.actor.workspace))


async def get_pack(name: Name, plane: Plane, call: Called) -> Pack:
    """Its digest and size."""
    return await plane.packs.get(call.actor.workspace, name)


async def delete_pack(name: Name, plane: Plane, call: Called) -> Pack:
    """Refused while a sandbox or a snapshot has it."""
    call.detail["pack"] = name
    return await plane.packs.delete(call.actor.workspace, name)
