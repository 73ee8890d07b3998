"""The audit: what was asked, by whom, and how it ended."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from cpuos.errors import InvalidRequest, NotFound
from cpuos.server.audit import list_entries
from cpuos.server.routes.called import Called, Plane, find
from cpuos.types.audit import ACTIONS, AuditList

__all__ = ["list_audit"]


async def list_audit(
    plane: Plane,
    call: Called,
    sandbox: Annotated[str | None, Query(min_length=1, max_length=63)] = None,
    action: Annotated[
        str | None, Query(max_length=63, description="A kind (command.start) or a noun (command).")
    ] = None,
    after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> AuditList:
    """Entries of the workspace in the order in which they were recorded; `next_after` pages on."""
    if action is not None:
        _check_action(action)
    await plane.take_journal()
    unknown: NotFound | None = None
    if sandbox is not None:
        try:
            sandbox = (await find(plane, call, sandbox)).id
        except NotFound as error:
            unknown = error  # the entries of one may outlive its record, and are found by its id
    async with plane.database.read() as connection:
        listed = await list_entries(
            connection, call.actor.workspace, sandbox=sandbox, action=action, after=after, limit=limit
        )
    if unknown is not None and not listed.entries and not after:
        raise unknown
    return listed


def _check_action(action: str) -> None:
    """A kind or a noun that no entry can have is a typo, and no empty list."""
    if action in ACTIONS or action in {known.partition(".")[0] for known in ACTIONS}:
        return
    raise InvalidRequest(
        f"cannot list the audit: unknown action {action!r}",
        f"actions are {', '.join(ACTIONS)}, or a noun of these",
        hint="cpuos audit --action command.start",
        details={"field": "action", "value": action, "actions": list(ACTIONS)},
    )
