"""Pause, resume, snapshots and forks."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Request
from sqlalchemy import Row

from cpuos.server.control_plane import ControlPlane
from cpuos.server.db import snapshots as records
from cpuos.server.db.sandboxes import sandbox_of
from cpuos.server.db.snapshots import resolve_snapshot, snapshot_of
from cpuos.server.guard import Call
from cpuos.server.routes.called import Called, Plane, Ref, find
from cpuos.types.sandbox import Sandbox, SandboxCreated
from cpuos.types.snapshot import Fork, Forked, Snapshot, SnapshotCreate, SnapshotList

__all__ = [
    "ReplayFork",
    "ReplaySnapshot",
    "create_snapshot",
    "delete_snapshot",
    "fork_sandbox",
    "fork_snapshot",
    "get_snapshot",
    "list_snapshots",
    "pause_sandbox",
    "resume_sandbox",
]

MAX_LISTED = 1000
SnapshotRef = Annotated[
    str,
    Path(
        min_length=1, max_length=63, description="A snapshot's id, its name, or a unique prefix of 4 letters or more."
    ),
]


async def pause_sandbox(ref: Ref, plane: Plane, call: Called) -> Sandbox:
    """Keep its memory on disk and free memory and CPU; answer when that is done. A paused one stays as it is.

    What fails leaves it running. The next call to it resumes it, unless it was created without `auto_resume`.
    """
    return sandbox_of(await plane.pausing.pause(await find(plane, call, ref)))


async def resume_sandbox(
    ref: Ref,
    plane: Plane,
    call: Called,
    incomplete: Annotated[bool, Query(description="Also where not all that it had is there.")] = False,
) -> Sandbox:
    """Let it go on; answer when its agent has answered. A running one stays as it is.

    Its processes, listeners, commands and disk are held against what they were when it was paused. Where something is
    missing that is `restore_incomplete`, with the list in `details.missing`, and it stays paused with all that was
    saved; with `incomplete` it goes on without that, and `restore_incomplete` of its record is the list.

    `resumed_from` says whether its programs go on or only its files came back; then too the list names what is gone.
    What fails leaves it paused, with the reason in its record.
    """
    row = await plane.pausing.resume(await find(plane, call, ref), incomplete=incomplete)
    call.detail |= {"resumed_from": row.resumed_from, "restore_incomplete": row.restore_incomplete}
    return sandbox_of(row)


async def create_snapshot(ref: Ref, body: SnapshotCreate, plane: Plane, call: Called) -> Snapshot:
    """What a running or paused sandbox is now, to make others of. A running one stands still meanwhile."""
    row = await find(plane, call, ref)
    made = await plane.snapshots.create(row, body, actor=call.actor.id, intent=_intent(call))
    call.detail |= {"snapshot": made.id, "size_bytes": made.size_bytes}
    return snapshot_of(made)


async def fork_sandbox(ref: Ref, body: Fork, plane: Plane, call: Called) -> Forked:
    """Running copies of a sandbox as it is now, all of them or none; it goes on itself."""
    row = await find(plane, call, ref)
    made = await plane.snapshots.fork_sandbox(row, body, actor=call.actor.id, intent=_intent(call))
    return _forked(plane, call, made)


async def list_snapshots(
    plane: Plane,
    call: Called,
    sandbox: Annotated[str | None, Query(min_length=1, max_length=63, description="Only those of this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
) -> SnapshotList:
    """Snapshots of the workspace, newest first."""
    if sandbox is not None:
        sandbox = (await find(plane, call, sandbox)).id
    async with plane.database.read() as connection:
        rows = await records.list_snapshots(connection, call.actor.workspace, sandbox=sandbox, limit=limit)
    return SnapshotList(snapshots=[snapshot_of(row) for row in rows])


async def get_snapshot(ref: SnapshotRef, plane: Plane, call: Called) -> Snapshot:
    return snapshot_of(await _find_snapshot(plane, call, ref))


async def delete_snapshot(ref: SnapshotRef, plane: Plane, call: Called) -> Snapshot:
    """Remove it; sandboxes that began with it live on."""
    row = await _find_snapshot(plane, call, ref)
    call.detail |= {"snapshot": row.id}
    return snapshot_of(await plane.snapshots.delete(row))


async def fork_snapshot(ref: SnapshotRef, body: Fork, plane: Plane, call: Called) -> Forked:
    """Running sandboxes that begin with a snapshot, all of them or none."""
    row = await plane.snapshots.resolve(call.actor.workspace, ref)
    call.sandbox = row.sandbox
    call.detail |= {"snapshot": row.id}
    made = await plane.snapshots.fork_snapshot(row, body, actor=call.actor.id, intent=_intent(call))
    return _forked(plane, call, made)


class ReplaySnapshot:
    """The answer has no secrets: it is kept and given again as it was."""

    def keep(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer

    def restore(self, request: Request, kept: dict[str, Any]) -> dict[str, Any]:
        return kept


class ReplayFork:
    """A fork's answer is kept without its tickets; a repeat gets fresh ones."""

    def keep(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"sandboxes": [one["sandbox"] for one in answer["sandboxes"]]}

    def restore(self, request: Request, kept: dict[str, Any]) -> dict[str, Any]:
        plane, actor = request.app.state.plane, request.state.call.actor
        sandboxes = [Sandbox.model_validate(one) for one in kept["sandboxes"]]
        made = [SandboxCreated(sandbox=one, access=plane.access(one, actor=actor.id)) for one in sandboxes]
        return Forked(sandboxes=made).model_dump(mode="json")


async def _find_snapshot(plane: ControlPlane, call: Call, ref: str) -> Row[Any]:
    async with plane.database.read() as connection:
        row = await resolve_snapshot(connection, call.actor.workspace, ref)
    call.sandbox = row.sandbox
    return row


def _forked(plane: ControlPlane, call: Call, made: list[Row[Any]]) -> Forked:
    call.detail |= {"sandboxes": [row.id for row in made]}
    actor = call.actor.id
    return Forked(
        sandboxes=[SandboxCreated(sandbox=sandbox_of(row), access=plane.access(row, actor=actor)) for row in made]
    )


def _intent(call: Call) -> int | None:
    return call.intent.id if call.intent else None
