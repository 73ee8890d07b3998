"""Snapshots: made of a sandbox, begun with by others, removed; and forks, which are a snapshot and creates from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import CapacityExceeded, Conflict, CpuosError, InvalidRequest, NotFound, PlatformError, Unavailable
from cpuos.scheduler.base import Scheduler
from cpuos.server.asks import new_id, snapshot_amount
from cpuos.server.audit import SYSTEM
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.layers import layer_snapshots
from cpuos.server.db.sandboxes import row_of
from cpuos.server.db.snapshots import (
    all_snapshots,
    change_snapshot,
    insert_snapshot,
    remove_snapshot,
    rescued_snapshot,
    resolve_snapshot,
)
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.pausing import Pausing
from cpuos.server.quotas import Quotas
from cpuos.server.states import unusable
from cpuos.server.tasks import Tasks
from cpuos.types.alarms import AlarmRule
from cpuos.types.network import NetworkPolicy
from cpuos.types.node import SnapshotFacts
from cpuos.types.sandbox import Isolation, SandboxCreate, SandboxState
from cpuos.types.snapshot import Fork, SnapshotCreate, SnapshotState

__all__ = ["RESCUED_KEPT", "Snapshots", "wishes_of_fork"]

_log = structlog.get_logger("cpuos.server.snapshots")
_SHAPE = ("template", "cpu", "memory_mib", "disk_mib", "max_processes")
_TAKEN = frozenset({SandboxState.RUNNING, SandboxState.PAUSING, SandboxState.PAUSED, SandboxState.RESUMING})
FAILED_KEPT = timedelta(days=1)
RESCUED_KEPT = timedelta(days=1)
RESCUE_PAUSES_S = (0.1, 0.3, 1.0, 2.0)
# So long after a loss its node may be away, or refuse, before what is left there is given up.
RESCUE_LIMIT = timedelta(minutes=10)
UNOWNED_GRACE = timedelta(seconds=30)

Begun = Callable[[str], None]
Note = Callable[[AsyncConnection, str], Awaitable[None]]


class Snapshots:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        pausing: Pausing,
        quotas: Quotas,
        tasks: Tasks,
        clock: Clock,
        node: str = "",
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._pausing = pausing
        self._quotas = quotas
        self._tasks = tasks
        self._clock = clock
        self._node = node
        self._working: set[str] = set()
        self._unowned_since: dict[str, datetime] = {}

    # --- make ---

    async def create(
        self,
        row: Row[Any],
        request: SnapshotCreate,
        *,
        actor: str,
        intent: int | None,
        internal: bool = False,
        note: Note | None = None,
    ) -> Row[Any]:
        """A snapshot that is ready, or an error and nothing left of it; the sandbox goes on as before. `note` writes
        down whose it is, with its record: one that is `internal` and nobody's is removed."""
        state = SandboxState(row.state)
        if state not in _TAKEN:
            raise unusable(row.id, state, reason=row.reason, action="make a snapshot")
        snapshot_id = new_id()
        self._working.add(snapshot_id)
        try:
            made = await self._insert(
                row, request, snapshot_id, actor=actor, intent=intent, internal=internal, note=note
            )
            try:
                facts = await self._pausing.snapshot(row, snapshot=snapshot_id, memory=request.memory)
            except Exception as error:
                await self._failed(made, error)
                raise
            return await self._ready(made, facts)
        finally:
            self._working.discard(snapshot_id)
            self._scheduler.release(_key(snapshot_id))

    async def _insert(
        self,
        row: Row[Any],
        request: SnapshotCreate,
        snapshot_id: str,
        *,
        actor: str,
        intent: int | None,
        internal: bool,
        note: Note | None,
    ) -> Row[Any]:
        now = self._clock()
        values = {
            **_values(row, snapshot_id),
            "name": request.name,
            "state": SnapshotState.CREATING.value,
            "internal": internal,
            "memory": request.memory,
            "labels": row.labels if request.labels is None else request.labels,
            "created_by": actor,
            "intent": intent,
            "created_at": now,
            "changed_at": now,
        }
        try:
            async with self._database.write() as connection:
                if not internal:
                    await self._quotas.check_snapshots(connection, row.workspace)
                made = await insert_snapshot(connection, values)
                if note is not None:
                    await note(connection, made.id)
                # Within the transaction: where there is no room no record is left.
                amount = snapshot_amount(made)
                self._scheduler.hold(_key(snapshot_id), node=row.node, amount=amount, action="make a snapshot")
                return made
        except IntegrityError as error:
            raise Conflict(
                f"cannot make a snapshot: the name {request.name!r} is taken",
                "another snapshot of this workspace has it",
                code="name_taken",
                hint=f"cpuos snapshots rm {request.name}, or use another name",
                details={"field": "name", "value": request.name},
            ) from error

    async def _ready(self, made: Row[Any], facts: SnapshotFacts) -> Row[Any]:
        values = {"size_bytes": facts.size_bytes, "memory": facts.memory, "template_digest": facts.template_digest}
        async with self._database.write() as connection:
            ready = await change_snapshot(connection, made, state=SnapshotState.READY, now=self._clock(), **values)
        if ready is None:
            raise Conflict(f"cannot make a snapshot: {made.id} was removed while it was made")
        _log.info("snapshot ready", snapshot=made.id, sandbox=made.sandbox, size_bytes=facts.size_bytes)
        return ready

    async def _failed(self, made: Row[Any], error: Exception) -> None:
        fault = PlatformError("cannot make a snapshot: a fault of cpuOS", "the server's log has the details")
        told = error if isinstance(error, CpuosError) else fault
        reason = ": ".join(part for part in (told.what, told.why) if part)
        await self._remove_from_node(made)
        async with self._database.write() as connection:
            await change_snapshot(connection, made, state=SnapshotState.FAILED, now=self._clock(), reason=reason)

    # --- begin with one ---

    async def resolve(self, workspace: str, ref: str) -> Row[Any]:
        """A snapshot of this workspace that sandboxes can begin with."""
        async with self._database.read() as connection:
            row = await resolve_snapshot(connection, workspace, ref)
        if row.state != SnapshotState.READY.value:
            raise Conflict(
                f"cannot use snapshot {ref}: it is {row.state}",
                row.reason,
                hint="cpuos snapshots ls",
                details={"state": row.state},
            )
        return row

    async def create_sandbox(
        self, request: SandboxCreate, *, workspace: str, actor: str, intent: int | None, begun: Begun
    ) -> Row[Any]:
        """A running sandbox, from the snapshot that the request names or from its template."""
        if request.snapshot is None:
            return await self._lifecycle.create(request, workspace=workspace, actor=actor, intent=intent, begun=begun)
        origin = await self.resolve(workspace, request.snapshot)
        return await self._lifecycle.create(
            _filled(request, origin), workspace=workspace, actor=actor, intent=intent, begun=begun, origin=origin
        )

    # --- fork ---

    async def fork_sandbox(self, row: Row[Any], request: Fork, *, actor: str, intent: int | None) -> list[Row[Any]]:
        """So many sandboxes that go on as this one is now; all of them, or the error and none."""
        await self._check_quota(row.workspace, request.count)
        made = await self.create(row, SnapshotCreate(), actor=actor, intent=None, internal=True)
        self._working.add(made.id)
        try:
            wishes = wishes_of_fork(request, row, of=row)
            return await self._fork(made, wishes, request.count, actor=actor, intent=intent)
        finally:
            self._working.discard(made.id)
            await self._discard(made)

    async def fork_snapshot(self, row: Row[Any], request: Fork, *, actor: str, intent: int | None) -> list[Row[Any]]:
        """So many sandboxes that begin with it; all of them, or the error and none."""
        await self._check_quota(row.workspace, request.count)
        async with self._database.read() as connection:
            source = await row_of(connection, row.sandbox)
        wishes = wishes_of_fork(request, None, of=source)
        return await self._fork(row, wishes, request.count, actor=actor, intent=intent)

    async def _check_quota(self, workspace: str, count: int) -> None:
        """Before anything is made; each create checks again."""
        async with self._database.write() as connection:
            await self._quotas.check_sandboxes(connection, workspace, more=count)

    async def _fork(
        self, origin: Row[Any], wishes: SandboxCreate, count: int, *, actor: str, intent: int | None
    ) -> list[Row[Any]]:
        request = _filled(wishes, origin)

        async def one() -> Row[Any]:
            return await self._lifecycle.create(
                request, workspace=origin.workspace, actor=actor, intent=intent, origin=origin
            )

        answers = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        made = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not errors:
            return made
        undone = (self._lifecycle.kill(row, reason="another of the same fork was not made") for row in made)
        await asyncio.gather(*undone, return_exceptions=True)  # what cannot be ended now the reconciler ends
        raise errors[0]

    # --- of what was lost ---

    async def rescue(self, row: Row[Any]) -> bool:
        """Keep the files of a sandbox that died, as far as its node has them: a day long, as a snapshot of the system.

        The record says already that it is lost. What cannot be kept is not: then nothing of it is left, as is said.
        False: it may still be possible, and the node must not remove them yet.
        """
        return await asyncio.shield(self._tasks.share(row.id, "rescue", self._rescue(row)))

    async def _rescue(self, row: Row[Any]) -> bool:
        async with self._database.read() as connection:
            if await rescued_snapshot(connection, row) is not None:
                return True
        snapshot_id = new_id()
        self._working.add(snapshot_id)
        try:
            try:
                facts = await self._save_dead(row, snapshot_id)
            except CpuosError as error:
                _log.warning("files of a lost sandbox not kept", sandbox=row.id, error=str(error))
                hopeless = isinstance(error, NotFound | CapacityExceeded)
                return hopeless or self._clock() - (row.lost_at or row.changed_at) > RESCUE_LIMIT
            reason = f"kept when its sandbox was lost: {row.lost_reason or row.reason}"
            values = {**_values(row, snapshot_id), "memory": False, "reason": reason, "size_bytes": facts.size_bytes}
            values |= {"created_by": SYSTEM, "created_at": self._clock(), "changed_at": self._clock()}
            async with self._database.write() as connection:
                await insert_snapshot(connection, {**values, "state": SnapshotState.READY.value})
            _log.info("files of a lost sandbox kept", sandbox=row.id, snapshot=snapshot_id)
            return True
        finally:
            self._working.discard(snapshot_id)

    async def _save_dead(self, row: Row[Any], snapshot_id: str) -> SnapshotFacts:
        node = self._scheduler.client(row.node)
        for pause_s in RESCUE_PAUSES_S:
            try:
                return await node.snapshot(row.id, generation=row.generation, snapshot=snapshot_id, memory=False)
            except (NotFound, Unavailable, CapacityExceeded):
                raise
            except CpuosError:
                await asyncio.sleep(pause_s)  # the node is still taking away what is left of its processes
        return await node.snapshot(row.id, generation=row.generation, snapshot=snapshot_id, memory=False)

    # --- remove ---

    async def delete(self, row: Row[Any]) -> Row[Any]:
        """Remove it; return when its node has. Sandboxes that began with it are not touched."""
        if row.state == SnapshotState.CREATING.value and row.id in self._working:
            raise Conflict(
                f"cannot remove snapshot {row.id}: it is being made", hint="repeat the call when it is ready"
            )
        async with self._database.write() as connection:
            deleting = await change_snapshot(connection, row, state=SnapshotState.DELETING, now=self._clock())
        if deleting is None:
            raise Conflict(f"cannot remove snapshot {row.id}: its state has just changed", hint="repeat the call")
        try:
            await self._scheduler.client(row.node).delete_snapshot(row.id)
        except Conflict:
            async with self._database.write() as connection:
                await change_snapshot(connection, deleting, state=SnapshotState(row.state), now=self._clock())
            raise
        async with self._database.write() as connection:
            await remove_snapshot(connection, row.id)
        return deleting

    async def _discard(self, made: Row[Any]) -> None:
        try:
            await self.delete(made)
        except CpuosError as error:  # the reconciler removes what was made for a fork alone
            _log.warning("snapshot of a fork not removed yet", snapshot=made.id, error=str(error))

    async def _remove_from_node(self, row: Row[Any]) -> None:
        try:
            await self._scheduler.client(row.node).delete_snapshot(row.id)
        except CpuosError as error:  # the reconciler removes what no record owns
            _log.warning("node not cleaned", snapshot=row.id, error=str(error))

    # --- reconcile ---

    async def tidy(self) -> None:
        """End what was left, and remove what nobody owns. A step of the reconciler."""
        node = self._scheduler.client(self._node)
        asked_at = self._clock()
        on_node = {facts.id: facts for facts in await node.snapshots()}
        async with self._database.read() as connection:
            rows = {row.id: row for row in await all_snapshots(connection)}
            layers = await layer_snapshots(connection)
            surplus = _surplus(rows.values(), limits=await self._quotas.sandbox_limits(connection))
        for row in rows.values():
            if row.id not in self._working and row.changed_at < asked_at:
                owned = row.id not in surplus and (row.id in layers or not row.internal)
                await self._tidy(row, on_node.get(row.id), owned=owned)
        owned = {key for key, row in rows.items() if row.state != SnapshotState.FAILED.value} | self._working
        await self._remove_unowned(set(on_node) - owned, asked_at)

    async def _tidy(self, row: Row[Any], facts: SnapshotFacts | None, *, owned: bool) -> None:
        state = SnapshotState(row.state)
        if not owned and state is not SnapshotState.DELETING:
            await self._discard(row)
        elif state is SnapshotState.CREATING and facts is not None:
            await self._ready(row, facts)
        elif state is SnapshotState.CREATING:
            await self._set_failed(row, "the server was restarted before the node had made it")
        elif state is SnapshotState.READY and facts is None:
            await self._set_failed(row, "the node has it no more")
        elif state is SnapshotState.DELETING:
            await self._scheduler.client(row.node).delete_snapshot(row.id)
            async with self._database.write() as connection:
                await remove_snapshot(connection, row.id)
        elif (
            state is SnapshotState.READY and row.created_by == SYSTEM and row.created_at < self._clock() - RESCUED_KEPT
        ):
            await self._discard(row)
        elif state is SnapshotState.FAILED and row.changed_at < self._clock() - FAILED_KEPT:
            async with self._database.write() as connection:
                await remove_snapshot(connection, row.id)

    async def _set_failed(self, row: Row[Any], reason: str) -> None:
        async with self._database.write() as connection:
            await change_snapshot(connection, row, state=SnapshotState.FAILED, now=self._clock(), reason=reason)

    async def _remove_unowned(self, ids: set[str], now: datetime) -> None:
        self._unowned_since = {key: self._unowned_since.get(key, now) for key in ids}
        for key, since in self._unowned_since.items():
            if now - since >= UNOWNED_GRACE:
                _log.info("unowned snapshot removed", snapshot=key)
                await self._scheduler.client(self._node).delete_snapshot(key)


def _surplus(rows: Iterable[Row[Any]], *, limits: Mapping[str, int | None]) -> set[str]:
    """What was kept of lost sandboxes beyond as many as a workspace may have at once, the oldest: more than that it
    cannot have lost but by losing again and again."""
    kept: dict[str, list[Row[Any]]] = {}
    for row in rows:
        if row.created_by == SYSTEM and row.state == SnapshotState.READY.value:
            kept.setdefault(row.workspace, []).append(row)
    surplus = set()
    for workspace, found in kept.items():
        limit = limits.get(workspace)
        newest = sorted(found, key=lambda row: row.created_at, reverse=True)
        surplus |= {row.id for row in newest[limit:]} if limit is not None else set()
    return surplus


def wishes_of_fork(request: Fork, row: Row[Any] | None, *, of: Row[Any] | None) -> SandboxCreate:
    """What each of a fork's sandboxes is to be beside its snapshot: as the one they are made of. `of` is that one, also
    where only its snapshot is forked: whoever made it as an emulated one has asked for that."""
    values: dict[str, Any] = {}
    if row is not None:
        kept = (
            "timeout_s",
            "on_timeout",
            "idle_timeout_s",
            "on_idle",
            "auto_resume",
            "root_checkpoint_interval_s",
            "task",
            "labels",
            "alarms",
        )
        values = {name: getattr(row, name) for name in kept} | {"network": NetworkPolicy.model_validate(row.network)}
    values["allow_emulated"] = of is not None and of.isolation == Isolation.EMULATED.value
    given = {"timeout_s": request.timeout_s, "labels": request.labels}
    return SandboxCreate(**values | {name: value for name, value in given.items() if value is not None})


def _filled(request: SandboxCreate, origin: Row[Any]) -> SandboxCreate:
    """The request with all that the snapshot settles."""
    settled = {name: getattr(origin, name) for name in (*_SHAPE, "runtime")}
    for name in sorted(request.model_fields_set & set(settled)):
        value = getattr(request, name)
        if value not in (settled[name], "auto"):
            raise InvalidRequest(
                f"cannot create sandbox: {name} {value!r} does not fit the snapshot",
                f"what begins with snapshot {origin.id} has {name} {settled[name]!r}",
                hint=f"leave {name} out",
                details={"field": name, "value": value},
            )
    values = {**settled, "snapshot": origin.id}
    if "labels" not in request.model_fields_set:
        values["labels"] = origin.labels
    if "network" not in request.model_fields_set:
        values["network"] = NetworkPolicy.model_validate(origin.network)
    if "alarms" not in request.model_fields_set:
        values["alarms"] = [AlarmRule.model_validate(rule) for rule in origin.alarms]
    return request.model_copy(update=values)


def _values(row: Row[Any], snapshot_id: str) -> dict[str, Any]:
    """What a snapshot has of its sandbox."""
    asked = ("network", "alarms", "labels", "packs", *_SHAPE)
    taken = ("workspace", "runtime", "node", "template_digest", "image", *asked)
    return {**{name: getattr(row, name) for name in taken}, "id": snapshot_id, "sandbox": row.id}


def _key(snapshot_id: str) -> str:
    """Of its room at the scheduler."""
    return f"snapshot:{snapshot_id}"
