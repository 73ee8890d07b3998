"""The loop that makes records and nodes agree, whatever stopped in between; `decide.py` says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row, select

from cpuos.errors import CpuosError
from cpuos.scheduler.base import Scheduler
from cpuos.server.clock import Clock
from cpuos.server.connections import ConnectionIngest
from cpuos.server.db.database import Database
from cpuos.server.db.models import SandboxRow
from cpuos.server.db.sandboxes import due_rows, find_sandboxes, live_rows, row_of
from cpuos.server.decide import (
    Action,
    Expire,
    FailCreate,
    FinishCreate,
    FinishMove,
    FinishStop,
    Lose,
    Record,
    Remove,
    World,
    decide,
)
from cpuos.server.journal import JournalIngest
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.network import Networks
from cpuos.server.packs import Packs
from cpuos.server.pausing import Pausing
from cpuos.server.ready import ReadySandboxes
from cpuos.server.relief import Relief
from cpuos.server.retention import Retention
from cpuos.server.settlement import Settlement
from cpuos.server.snapshots import Snapshots
from cpuos.server.tasks import Tasks
from cpuos.server.usage_alarms import UsageAlarms
from cpuos.server.wakes import Wakes
from cpuos.types.node import SandboxFacts
from cpuos.types.sandbox import LIVE_STATES, OnEnd, SandboxState

__all__ = ["Reconciler"]

_log = structlog.get_logger("cpuos.server.reconciler")
TICK_S = 1.0
SWEEP_S = 10.0
RELIEF_S = 2.0
CHANGES_WAIT_S = 20.0
RETRY_S = 0.5
UNOWNED_GRACE = timedelta(seconds=30)


class Reconciler:
    """Each step is safe to repeat, and safe to be cut anywhere."""

    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        pausing: Pausing,
        ready: ReadySandboxes,
        wakes: Wakes,
        snapshots: Snapshots,
        packs: Packs,
        networks: Networks,
        journal: JournalIngest,
        connections: ConnectionIngest,
        settlement: Settlement,
        retention: Retention,
        relief: Relief,
        usage_alarms: UsageAlarms,
        alarm_interval_s: float,
        tasks: Tasks,
        clock: Clock,
        record_retention_s: float,
        node: str = "",
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._pausing = pausing
        self._ready = ready
        self._wakes = wakes
        self._snapshots = snapshots
        self._packs = packs
        self._networks = networks
        self._journal = journal
        self._connections = connections
        self._settlement = settlement
        self._retention = retention
        self._relief = relief
        self._usage_alarms = usage_alarms
        self._alarm_interval_s = alarm_interval_s
        self._tasks = tasks
        self._clock = clock
        self._record_kept = timedelta(seconds=record_retention_s)
        self._node = node
        self._unowned_since: dict[str, datetime] = {}
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loops: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self.tick, TICK_S),
            (self.sweep, SWEEP_S),
            (self.tell_networks, TICK_S),
            (self.pause_idle, TICK_S),
            (self.relieve, RELIEF_S),
            (self.look_at_usage, self._alarm_interval_s),
            (self._wakes.follow, 0),
            (self._ready.follow, 0),
            (self.ingest, TICK_S),
            (self.ingest_connections, TICK_S),
        ]
        self._loops = [asyncio.create_task(self._repeat(step, every_s)) for step, every_s in loops]
        self._loops.append(asyncio.create_task(self._watch()))

    async def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    # --- the steps ---

    async def tick(self) -> None:
        """What the clock and this server's own records ask for."""
        await self._apply([], listed_at=None)
        await self._settlement.run()
        await self._tell_gateway()

    async def sweep(self) -> None:
        """Compare everything: all the node has with all that is on record."""
        await self._scheduler.refresh()
        listed_at = self._clock()
        facts = await self._scheduler.client(self._node).list()
        await self._apply(facts, listed_at=listed_at)
        await self._snapshots.tidy()
        await self._packs.tidy()
        await self._settlement.prune()
        await self._connections.prune()
        await self._retention.prune()

    async def take_changes(self, facts: Sequence[SandboxFacts]) -> None:
        """News of some sandboxes: deaths, and pauses by the node itself, that are not what this server is doing
        anyway."""
        told = [one for one in facts if not one.alive or one.paused]
        news = [one for one in told if self._lifecycle.creation(one.id) or not self._tasks.busy(one.id)]
        if news:
            await self._apply(news, listed_at=None)

    async def tell_networks(self) -> None:
        """Network policies that their nodes have not put in place yet. A step of its own: nothing holds it up."""
        await self._networks.tell_pending()

    async def relieve(self) -> None:
        """What nodes tell of themselves is written down, and those that are short of memory are helped."""
        await self._relief.run()

    async def look_at_usage(self) -> None:
        """What sandboxes use is held against the rules of alarms."""
        await self._usage_alarms.look()

    async def pause_idle(self) -> None:
        """What was idle for its time is paused or ended."""
        await self._wakes.pause_idle()

    async def ingest(self) -> None:
        """Take over the gateway's journal."""
        await self._tasks.share("journal", "take", self._journal.run())

    async def ingest_connections(self) -> None:
        """Take over what the node's records worker has seen."""
        await self._tasks.share("connections", "take", self._connections.run())

    # --- loops ---

    async def _watch(self) -> None:
        after, lost = 0, ""
        while True:
            try:
                news = await self._scheduler.client(self._node).changes(after, wait_s=CHANGES_WAIT_S)
                after, lost = news.seq, ""
                await self.take_changes(news.changes)
            except CpuosError as error:
                if error.why != lost:
                    _log.warning("node out of reach", error=str(error))
                after, lost = 0, error.why  # a node that restarted counts anew
                await asyncio.sleep(RETRY_S)
            except Exception:
                _log.exception("reconciler step failed", step="changes")
                await asyncio.sleep(TICK_S)

    async def _repeat(self, step: Callable[[], Awaitable[None]], every_s: float) -> None:
        put_off = ""
        while True:
            wait_s = every_s
            try:
                await step()
                put_off = ""
            except CpuosError as error:
                if error.why != put_off:  # said once, not every second
                    _log.warning("reconciler step put off", step=step.__name__, error=str(error))
                put_off, wait_s = error.why, min(every_s or RETRY_S, TICK_S)
            except Exception:
                _log.exception("reconciler step failed", step=step.__name__)
                wait_s = every_s or TICK_S
            await asyncio.sleep(wait_s)

    # --- deciding and doing ---

    async def _apply(self, facts: Sequence[SandboxFacts], *, listed_at: datetime | None) -> None:
        now = self._clock()
        rows = await self._rows({one.id for one in facts}, now=now, all_live=listed_at is not None)
        if listed_at is not None:
            unowned = {one.id for one in facts} - set(rows)
            self._unowned_since = {key: self._unowned_since.get(key, now) for key in unowned}
        world = World(
            now=now,
            records={row.id: self._record(row) for row in rows.values()},
            facts=facts,
            listed_at=listed_at,
            unowned_since=self._unowned_since,
            unowned_grace=UNOWNED_GRACE,
        )
        told = {one.id: one for one in facts}
        for action in decide(world):
            work = self._do(action, row=rows.get(action.id), facts=told.get(action.id))
            self._tasks.share(action.id, type(action).__name__, work)

    async def _do(self, action: Action, *, row: Row[Any] | None, facts: SandboxFacts | None) -> None:
        if row is not None and not await self._is_still_so(action, row):
            return
        _log.info("reconciler acts", action=type(action).__name__, sandbox=action.id)
        try:
            match action:
                case Lose() if row is not None:
                    await self._lifecycle.lose(row, reason=action.reason)
                case FailCreate() if row is not None:
                    await self._lifecycle.fail_create(row, reason=action.reason)
                case FinishCreate() if row is not None and facts is not None:
                    await self._lifecycle.finish_create(row, facts)
                case FinishStop() if row is not None:
                    await self._lifecycle.finish_stop(row)
                case FinishMove() if row is not None:
                    await self._pausing.finish(row)
                case Expire() if (
                    row is not None and row.on_timeout == OnEnd.PAUSE and row.state == SandboxState.RUNNING
                ):
                    await self._pausing.expire(row, reason=action.reason)
                case Expire() if row is not None:
                    await self._lifecycle.expire(row, reason=action.reason)
                case Remove():
                    left = row is not None and row.state == SandboxState.LOST and facts is not None and not facts.alive
                    # An earlier server was ended before it had, or the node was away.
                    if left and not await self._snapshots.rescue(row):
                        return
                    node = row.node if row is not None else self._node
                    await self._scheduler.client(node).delete(action.id, generation=action.generation)
        except CpuosError as error:
            _log.warning("reconciler action put off", action=type(action).__name__, sandbox=action.id, error=str(error))

    async def _is_still_so(self, action: Action, row: Row[Any]) -> bool:
        """Whether the record is as it was when this was decided. It was read a moment before: a create or a move of
        this process may have ended since, and would be taken for one that nobody works at. What is at work now is
        asked first: what it writes is on record before it is gone."""
        if isinstance(action, FinishCreate | FailCreate) and self._lifecycle.creation(row.id) is not None:
            return False
        async with self._database.read() as connection:
            current = await row_of(connection, row.id)
        seen = ("state", "generation", "changed_at")
        return current is not None and all(getattr(current, name) == getattr(row, name) for name in seen)

    async def _rows(self, ids: set[str], *, now: datetime, all_live: bool) -> dict[str, Row[Any]]:
        """All live ones where it is known what the node has not; else those that are due, and those that are asked
        for."""
        async with self._database.read() as connection:
            found = await live_rows(connection) if all_live else await due_rows(connection, now=now)
            rows = {row.id: row for row in found}
            missing = ids - set(rows)
            if missing:
                rows |= {row.id: row for row in await find_sandboxes(connection, missing)}
        return rows

    def _record(self, row: Row[Any]) -> Record:
        return Record(
            id=row.id,
            generation=row.generation,
            state=SandboxState(row.state),
            changed_at=row.changed_at,
            deadline_at=row.deadline_at,
            expires_at=row.expires_at,
            timeout_s=row.timeout_s,
            busy=self._lifecycle.creation(row.id) is not None or self._tasks.busy(row.id),
        )

    async def _tell_gateway(self) -> None:
        """Ends that the gateway has not heard of, and output that is kept no longer."""
        ended = SandboxRow.state.not_in([state.value for state in LIVE_STATES])
        untold = SandboxRow.gateway_stage == "attached"
        old = (SandboxRow.gateway_stage == "detached") & (SandboxRow.ended_at < self._clock() - self._record_kept)
        statement = select(*SandboxRow.__table__.c).where(ended, untold | old).limit(100)
        async with self._database.read() as connection:
            rows = (await connection.execute(statement)).all()
        for row in rows:
            if row.gateway_stage == "attached":
                await self._lifecycle.detach(row)
            else:
                await self._lifecycle.forget(row)
