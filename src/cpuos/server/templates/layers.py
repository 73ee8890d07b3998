"""What the steps of builds have left, kept for later builds: snapshots of build sandboxes, without processes.

A layer is found by a key of all that went into its steps, the workspace included: nobody goes on from what another
workspace has made, nor learns what it has built. Layers go when their parent does, when nobody has used them for some
days, the longest unused first when a workspace's become too many, and when the operator prunes.

To go is one write: the record says no longer that the snapshot is a layer. A snapshot of the system that is nobody's is
removed by the reconciler, whichever daemon ends meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import CpuosError
from cpuos.server.clock import Clock
from cpuos.server.db import layers as records
from cpuos.server.db.database import Database
from cpuos.server.snapshots import Snapshots
from cpuos.server.templates.active import Active
from cpuos.types.snapshot import SnapshotCreate

__all__ = ["UNUSED_KEPT", "Layers", "StoredLayer"]

UNUSED_KEPT = timedelta(days=7)
_log = structlog.get_logger("cpuos.server.templates")


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    snapshot: str
    used_at: datetime
    in_use: bool
    """A build at work may begin with it, or has."""


class Layers:
    def __init__(self, *, database: Database, snapshots: Snapshots, clock: Clock, workspace_mib: int) -> None:
        """`workspace_mib` is of all layers of a workspace; 0: none are kept."""
        self._database = database
        self._snapshots = snapshots
        self._clock = clock
        self._workspace_bytes = workspace_mib << 20
        self._users: dict[str, Active] = {}

    def hold(self, active: Active) -> None:
        """Before it looks for one: until `release` none that it may take up is pruned."""
        self._users[active.build.id] = active

    def release(self, active: Active) -> None:
        self._users.pop(active.build.id, None)

    async def find(self, workspace: str, keys: Sequence[str]) -> tuple[int, Row[Any] | None]:
        """For the keys of a build's steps: how many of them need not be done, and the snapshot to begin with."""
        async with self._database.write() as connection:
            found = await records.ready_layers(connection, workspace, keys)
            for number in range(len(keys), 0, -1):
                snapshot = found.get(keys[number - 1])
                if snapshot is not None:
                    await records.touch_layer(connection, workspace, keys[number - 1], now=self._clock())
                    return number, snapshot
        return 0, None

    async def keep(self, active: Active, key: str) -> None:
        """Keep what the build's sandbox is now. Where that is not possible the build goes on without."""
        if self._workspace_bytes == 0:
            return
        async with self._database.read() as connection:
            if await records.has_layer(connection, active.workspace, key):
                return
        values = {"workspace": active.workspace, "key": key, "parent_digest": active.parent_digest}

        async def note(connection: AsyncConnection, snapshot: str) -> None:
            now = self._clock()
            await records.put_layer(connection, {**values, "snapshot": snapshot, "created_at": now, "used_at": now})

        try:
            await self._snapshots.create(
                active.row, SnapshotCreate(memory=False), actor=active.actor, intent=None, internal=True, note=note
            )
        except CpuosError as error:
            _log.info("layer not kept", build=active.build.id, why=str(error))
            return
        await self._make_room(active.workspace)

    async def drop(self, workspace: str, snapshot: str) -> None:
        """It cannot be begun with."""
        async with self._database.write() as connection:
            await records.drop_layers(connection, workspace, [snapshot])

    async def prune(self, workspace: str, *, keep_bytes: int = 0) -> None:
        """Let go of the longest unused, until the rest takes no more than that. The reconciler removes them."""
        async with self._database.write() as connection:
            rows = await records.layers_of(connection, workspace)
            held, doomed = 0, []
            for row in rows:
                held += row.size_bytes or 0
                if held > keep_bytes or keep_bytes == 0:
                    doomed.append(row.snapshot)
            await records.drop_layers(connection, workspace, doomed)

    async def stored(self) -> list[StoredLayer]:
        """Of all workspaces."""
        async with self._database.read() as connection:
            return self._stored(await records.all_layers(connection))

    async def prune_unused(self, unused_s: float) -> set[str]:
        """Let go of those that no build has begun with for so long, in all workspaces; their snapshots."""
        async with self._database.write() as connection:
            rows = await records.all_layers(connection)
            since = self._clock() - timedelta(seconds=unused_s)
            doomed = {layer.snapshot for layer in self._stored(rows) if not layer.in_use and layer.used_at <= since}
            for workspace in {row.workspace for row in rows if row.snapshot in doomed}:
                await records.drop_layers(connection, workspace, doomed)
        return doomed

    def _stored(self, rows: Sequence[Row[Any]]) -> list[StoredLayer]:
        used = {(active.workspace, key) for active in self._users.values() for key in active.layers}
        begun = {active.sandbox.snapshot for active in self._users.values() if active.sandbox is not None}
        return [
            StoredLayer(
                snapshot=row.snapshot,
                used_at=row.used_at,
                in_use=(row.workspace, row.key) in used or row.snapshot in begun,
            )
            for row in rows
        ]

    async def tidy(self, *, installed: Collection[str]) -> None:
        """Let go of those that nobody can come to any more: their parent, by its digest, has no name; or unused."""
        async with self._database.write() as connection:
            await records.drop_stale_layers(connection, installed, unused_since=self._clock() - UNUSED_KEPT)

    async def _make_room(self, workspace: str) -> None:
        await self.prune(workspace, keep_bytes=self._workspace_bytes)
