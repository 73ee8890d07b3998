"""What one workspace may take: calls at once in guard, live sandboxes where they are inserted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import bindparam, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import LimitReached
from cpuos.server.db.models import Workspace
from cpuos.server.db.sandboxes import count_live
from cpuos.server.db.snapshots import count_snapshots

__all__ = ["MAX_CALLS", "Quotas"]

# Changing calls of one workspace at once. Above it the answer is a refusal, not a queue without end.
MAX_CALLS = 512
_workspaces = Workspace.__table__
_LIMIT = select(_workspaces.c.max_sandboxes).where(_workspaces.c.id == bindparam("workspace"))
_SNAPSHOT_LIMIT = select(_workspaces.c.max_snapshots).where(_workspaces.c.id == bindparam("workspace"))


class Quotas:
    def __init__(self, *, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        self._calls: Counter[str] = Counter()

    @contextmanager
    def hold_call(self, workspace: str) -> Iterator[None]:
        """One changing call at work."""
        if self._calls[workspace] >= self._max_calls:
            raise LimitReached(
                f"cannot take the call: {self._max_calls} changing calls of this workspace are at work",
                "each of them waits for a sandbox to be made or ended",
                hint="repeat when some have ended",
                details={"limit": "calls", "max": self._max_calls},
            )
        self._calls[workspace] += 1
        try:
            yield
        finally:
            self._calls[workspace] -= 1

    async def check_sandboxes(self, connection: AsyncConnection, workspace: str, *, more: int = 1) -> None:
        """In the transaction that inserts one more, so that a race cannot pass it."""
        limit = (await connection.execute(_LIMIT, {"workspace": workspace})).scalar_one()
        if limit is None:
            return
        live = await count_live(connection, workspace)
        if live + more > limit:
            raise LimitReached(
                f"cannot create sandbox: the workspace has {live} of its {limit} live sandboxes",
                f"its quota does not allow {more} more",
                hint="cpuos ls, then cpuos kill SANDBOX",
                details={"limit": "sandboxes", "max": limit},
            )

    async def sandbox_limits(self, connection: AsyncConnection) -> dict[str, int | None]:
        """By workspace."""
        found = await connection.execute(select(_workspaces.c.id, _workspaces.c.max_sandboxes))
        return {row.id: row.max_sandboxes for row in found.all()}

    async def check_snapshots(self, connection: AsyncConnection, workspace: str) -> None:
        """In the transaction that inserts one more."""
        limit = (await connection.execute(_SNAPSHOT_LIMIT, {"workspace": workspace})).scalar_one()
        if limit is not None and await count_snapshots(connection, workspace) >= limit:
            raise LimitReached(
                f"cannot make a snapshot: the workspace has its {limit} snapshots",
                "its quota allows no more",
                hint="cpuos snapshots ls, then cpuos snapshots rm SNAPSHOT",
                details={"limit": "snapshots", "max": limit},
            )
