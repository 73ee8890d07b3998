"""Sandboxes: create, list, get, update, kill."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query, Request

from cpuos.errors import InvalidRequest
from cpuos.server.allow_lists import check_allow_list
from cpuos.server.db import sandboxes as records
from cpuos.server.db.sandboxes import sandbox_of
from cpuos.server.routes.called import Called, Plane, Ref, find
from cpuos.types.sandbox import (
    LIVE_STATES,
    Sandbox,
    SandboxCreate,
    SandboxCreated,
    SandboxList,
    SandboxState,
    SandboxUpdate,
)

__all__ = [
    "ReplayCreate",
    "create_sandbox",
    "delete_sandbox",
    "get_sandbox",
    "list_sandboxes",
    "recreate_sandbox",
    "update_sandbox",
]

MAX_LISTED = 1000


async def create_sandbox(body: SandboxCreate, plane: Plane, call: Called) -> SandboxCreated:
    """Make a sandbox and answer when it runs and its agent has answered.

    The work goes on to its end when the caller goes away; the sandbox then lives until its timeout, and a repeat with
    the same Idempotency-Key answers the same sandbox.
    """
    check_allow_list(body.network, exemptions=plane.options.network_exceptions, field="network.allow")
    actor = call.actor
    intent = call.intent.id if call.intent else None
    row = await plane.snapshots.create_sandbox(
        body, workspace=actor.workspace, actor=actor.id, intent=intent, begun=call.begin
    )
    call.detail["started_from"] = row.started_from
    if row.snapshot is None:
        await plane.builder.begin(row, actor=actor.id)
    return SandboxCreated(sandbox=sandbox_of(row), access=plane.access(row, actor=actor.id))


async def list_sandboxes(
    plane: Plane,
    call: Called,
    state: Annotated[
        list[SandboxState | Literal["live", "all"]],
        Query(description="May repeat. `live` is every state of a sandbox that has not ended.", max_length=16),
    ] = ["all"],  # noqa: B006
    label: Annotated[list[str], Query(description="key:value; may repeat, all must match.", max_length=64)] = [],  # noqa: B006
    name: Annotated[str | None, Query(max_length=63)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
) -> SandboxList:
    """Sandboxes of the workspace, newest first."""
    async with plane.database.read() as connection:
        rows = await records.list_sandboxes(
            connection,
            call.actor.workspace,
            states=_states(state),
            name=name,
            labels=dict(_label(text) for text in label),
            limit=limit,
        )
    return SandboxList(sandboxes=[sandbox_of(row) for row in rows])


async def get_sandbox(ref: Ref, plane: Plane, call: Called) -> Sandbox:
    return sandbox_of(await find(plane, call, ref))


async def update_sandbox(ref: Ref, body: SandboxUpdate, plane: Plane, call: Called) -> Sandbox:
    """Change the length of the session (counted from now) or the labels of a live sandbox.

    Data packs cannot be attached to it: with `packs` that it was not made with nothing is changed.
    """
    row = await find(plane, call, ref)
    call.detail |= body.model_dump(exclude_none=True)
    await plane.packs.demand_attached(row, body.packs or {})
    return sandbox_of(await plane.lifecycle.update(row, body))


async def delete_sandbox(ref: Ref, plane: Plane, call: Called) -> Sandbox:
    """Kill it, and answer when nothing of it is left. One that has ended already stays as it is."""
    row = await find(plane, call, ref)
    return sandbox_of(await plane.lifecycle.kill(row, reason=f"killed by {call.actor.shown}"))


async def recreate_sandbox(ref: Ref, plane: Plane, call: Called) -> SandboxCreated:
    """Make a lost sandbox anew under its id, as its next generation; answer when it runs and its agent has answered.

    `recreated` says what of its files came back, and how old that is; its programs did not. Tickets, preview links and
    published ports of before are void. A failure leaves it lost, its files kept as they were. A running one stays as it
    is.
    """
    row = await find(plane, call, ref)
    intent = call.intent.id if call.intent else None
    row = await plane.recreating.recreate(row, intent=intent, begun=call.begin)
    call.detail |= {"generation": row.generation, "recreated": row.recreated}
    return SandboxCreated(sandbox=sandbox_of(row), access=plane.access(row, actor=call.actor.id))


class ReplayCreate:
    """A create's answer is kept without its ticket; a repeat gets a fresh one."""

    def keep(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"sandbox": answer["sandbox"]}

    def restore(self, request: Request, kept: dict[str, Any]) -> dict[str, Any]:
        sandbox = Sandbox.model_validate(kept["sandbox"])
        access = request.app.state.plane.access(sandbox, actor=request.state.call.actor.id)
        return SandboxCreated(sandbox=sandbox, access=access).model_dump(mode="json")


def _states(asked: list[SandboxState | Literal["live", "all"]]) -> set[SandboxState]:
    states: set[SandboxState] = set()
    for state in asked:
        if state == "all":
            states |= set(SandboxState)
        elif state == "live":
            states |= LIVE_STATES
        else:
            states.add(SandboxState(state))
    return states


def _label(text: str) -> tuple[str, str]:
    key, colon, value = text.partition(":")
    if not key or not colon:
        raise InvalidRequest(
            f"cannot read label: {text!r}", "write key:value", hint="label=team:data", details={"field": "label"}
        )
    return key, value
