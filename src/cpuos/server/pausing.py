"""Pause and resume, and the hold that a snapshot takes: verbs of a sandbox that others may have begun and not ended.

A pause freezes the guest through the gateway, then the node writes its memory and ends its processes. A resume takes
room, lets the node make the processes again, and the gateway's attach thaws them. At most one such move of a sandbox
runs in this process. What it leaves undecided (a part did not answer, the server was ended) stays `pausing` or
`resuming` on record, and `finish` ends it: by what the node then has, never by what was meant.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row

from cpuos.errors import Conflict, CpuosError, NotFound, SandboxGone, Unavailable
from cpuos.scheduler.base import Scheduler
from cpuos.server.asks import hostname_of, whole_of
from cpuos.server.audit import SYSTEM, Audit
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.sandboxes import advance, row_of
from cpuos.server.gateway import GatewayControl, Suspended
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.network import Networks
from cpuos.server.receipts import missing_of, not_all, receipt_of, resumed
from cpuos.server.states import Verb, unusable
from cpuos.server.tasks import Tasks
from cpuos.types.audit import AuditResult
from cpuos.types.node import SandboxFacts, SnapshotFacts
from cpuos.types.sandbox import LIVE_STATES, SandboxState

__all__ = ["Pausing"]

S = SandboxState
_log = structlog.get_logger("cpuos.server.pausing")
_MOVE = "move"
# Refusals of the gateway after which a sandbox surely runs on as before.
_UNCHANGED = frozenset({"sandbox_busy", "freeze_failed"})
# So long after its end a sandbox that is to be paused then may be unwilling, before it is killed.
_UNWILLING = timedelta(seconds=60)

Work = Callable[[Row[Any]], Coroutine[Any, Any, Any]]


class Pausing:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        gateway: GatewayControl,
        networks: Networks,
        lifecycle: Lifecycle,
        audit: Audit,
        tasks: Tasks,
        clock: Clock,
        wait_s: float,
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._gateway = gateway
        self._networks = networks
        self._lifecycle = lifecycle
        self._audit = audit
        self._tasks = tasks
        self._clock = clock
        self._wait_s = wait_s

    # --- the verbs ---

    async def pause(
        self, row: Row[Any], *, reason: str = "", idle_before: datetime | None = None, firmly: bool = False
    ) -> Row[Any]:
        """Paused, or an error and it runs on. `reason` is given when it was not asked for; with `idle_before` it is
        `sandbox_busy` unless nothing was open since then. No call resumes what is paused `firmly`."""

        def work(current: Row[Any]) -> Coroutine[Any, Any, Row[Any] | None]:
            return self._pause(current, reason=reason, idle_before=idle_before, firmly=firmly)

        return await self._move(row, begin={S.RUNNING: work}, done=S.PAUSED, action="pause sandbox")

    async def resume(self, row: Row[Any], *, reason: str = "", incomplete: bool = False) -> Row[Any]:
        """Running again, or an error and it is paused as before. `reason` is given when nobody asked for it. Where not
        all that it had is there that is `restore_incomplete`, unless it may be `incomplete`."""

        def work(current: Row[Any]) -> Coroutine[Any, Any, Row[Any] | None]:
            return self._resume(current, reason=reason, incomplete=incomplete)

        return await self._move(row, begin={S.PAUSED: work}, done=S.RUNNING, action="resume sandbox")

    async def snapshot(self, row: Row[Any], *, snapshot: str, memory: bool) -> SnapshotFacts:
        """What the sandbox is now, kept on its node under this id. A running one stands still meanwhile."""

        def of_running(current: Row[Any]) -> Coroutine[Any, Any, SnapshotFacts | None]:
            return self._snapshot_running(current, snapshot=snapshot, memory=memory)

        def of_paused(current: Row[Any]) -> Coroutine[Any, Any, SnapshotFacts]:
            return self._snapshot_paused(current, snapshot=snapshot, memory=memory)

        begin: Mapping[SandboxState, Work] = {S.RUNNING: of_running, S.PAUSED: of_paused}
        return await self._move(row, begin=begin, done=None, action="make a snapshot")

    async def end_idle(self, row: Row[Any], *, reason: str, idle_before: datetime) -> None:
        """Kill it, unless something was open since then."""

        async def hold(current: Row[Any]) -> Row[Any] | None:
            held = await self._freeze(current, secrets.token_hex(16), idle_before=idle_before)
            return held and held[0]

        held = await self._move(row, begin={S.RUNNING: hold}, done=None, action="end an idle sandbox")
        await self._lifecycle.kill(held, reason=reason)

    async def expire(self, row: Row[Any], *, reason: str) -> None:
        """Its time ended and it is to be paused then. One that cannot be paused for long is killed."""
        try:
            await self.pause(row, reason=reason)
        except Unavailable:
            raise  # nor could it be killed now
        except CpuosError as error:
            if row.expires_at is None or self._clock() < row.expires_at + _UNWILLING:
                raise
            await self._lifecycle.expire(row, reason=f"{reason}, and it could not be paused: {error.why or error.what}")

    async def finish(self, row: Row[Any]) -> None:
        """End what was left undecided, by what the node has of it now."""
        running = self._tasks.find(row.id, _MOVE)
        if running is not None:
            await asyncio.wait({running})
            return
        await self._share(row.id, self._finish(row))

    # --- one at a time ---

    async def _move(
        self, row: Row[Any], *, begin: Mapping[SandboxState, Work], done: SandboxState | None, action: str
    ) -> Any:
        """Start the work that belongs to its state, when no other moves it; what was left by others is ended first."""
        while True:
            running = self._tasks.find(row.id, _MOVE)
            if running is not None:
                await asyncio.wait({running})
            else:
                state = SandboxState(row.state)
                if state is done:
                    return row
                if state in begin:
                    result = await self._share(row.id, begin[state](row))
                    if result is not None:
                        return result
                elif state in (S.PAUSING, S.RESUMING):
                    await self._share(row.id, self._finish(row))
                else:
                    raise unusable(row.id, state, reason=row.reason, action=action)
            row = await self._reload(row)

    async def _share(self, sandbox_id: str, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.shield(self._tasks.share(sandbox_id, _MOVE, work))

    # --- pause ---

    async def _freeze(
        self, row: Row[Any], freeze: str, *, idle_before: datetime | None, firmly: bool = False
    ) -> tuple[Row[Any], Suspended] | None:
        """`pausing`, and its programs stand still, with what it told of them; None when its state was another
        meanwhile."""
        pausing = await self._advance(row, Verb.PAUSE)
        if pausing is None:
            return None
        try:
            told = await self._gateway.suspend(
                row.id,
                freeze=freeze,
                if_idle_since=None if idle_before is None else idle_before.timestamp(),
                auto_resume=row.auto_resume and not firmly,
            )
        except CpuosError as error:
            await self._run_on(pausing, frozen=error.code not in _UNCHANGED)
            raise
        return pausing, told

    async def _pause(
        self, row: Row[Any], *, reason: str, idle_before: datetime | None, firmly: bool
    ) -> Row[Any] | None:
        freeze = secrets.token_hex(16)
        held = await self._freeze(row, freeze, idle_before=idle_before, firmly=firmly)
        if held is None:
            return None
        pausing, told = held
        node = self._scheduler.client(row.node)
        try:
            facts = await node.pause(row.id, generation=row.generation, freeze=freeze, labels=pausing.labels)
        except CpuosError as error:
            facts = await self._look(pausing, action="pause sandbox")
            if not facts.paused:
                await self._run_on(pausing, frozen=True)
                raise _told(error, f"cannot pause sandbox {row.id}: it runs on") from error
        return await self._paused(pausing, reason=reason, told=told)

    async def _paused(
        self, row: Row[Any], *, reason: str, told: Suspended | None = None, since: datetime | None = None
    ) -> Row[Any]:
        """`since`: where that was before now, as after the shutdown of its node."""

        def changes(current: Row[Any], now: datetime) -> dict[str, Any]:
            now = since or now
            left_s = (current.expires_at - now).total_seconds() if current.expires_at else current.timeout_s
            # One that is paused because its time ended gets as much again.
            left_s = left_s if left_s > 0 else current.timeout_s
            changed = {"paused_at": now, "left_s": left_s, "expires_at": None, "reason": reason}
            changed["restore_incomplete"] = None
            # Of the record as the node was told it: labels that were changed since are a change after the pause.
            return {**changed, "receipt": receipt_of(row, told, now=now)}

        paused = await self._advance(row, Verb.PAUSED, changes, note="sandbox.pause", reason=reason)
        if paused is None:
            raise await self._ended(row, action="pause sandbox")
        self._scheduler.park(row.id)
        _log.info("sandbox paused", sandbox=row.id, reason=reason)
        return paused

    async def _run_on(self, row: Row[Any], *, frozen: bool) -> Row[Any]:
        """It is not paused after all: thaw it, and say that it runs."""
        if frozen:
            current = await self._reload(row)
            if current.network_applied < current.network_version:
                await self._networks.tell(current)  # before a program of it goes on
            await self._reach(row)
        running = await self._advance(row, Verb.UNPAUSE)
        if running is None:
            raise await self._ended(row, action="go on with sandbox")
        return running

    # --- snapshots ---

    async def _snapshot_running(self, row: Row[Any], *, snapshot: str, memory: bool) -> SnapshotFacts | None:
        freeze = secrets.token_hex(16)
        frozen = await self._freeze(row, freeze, idle_before=None)
        if frozen is None:
            return None
        held, _ = frozen
        node = self._scheduler.client(row.node)
        try:
            facts = await node.snapshot(
                row.id, generation=row.generation, snapshot=snapshot, freeze=freeze, memory=memory
            )
        except CpuosError as error:
            await self._look(held, action="make a snapshot")
            await self._run_on(held, frozen=True)
            raise _told(error, f"cannot make a snapshot of sandbox {row.id}: it runs on") from error
        try:
            await self._run_on(held, frozen=True)
        except CpuosError as error:  # the snapshot is good; the reconciler goes on with the sandbox
            _log.warning("sandbox does not go on yet", sandbox=row.id, error=str(error))
        return facts

    async def _snapshot_paused(self, row: Row[Any], *, snapshot: str, memory: bool) -> SnapshotFacts:
        node = self._scheduler.client(row.node)
        return await node.snapshot(row.id, generation=row.generation, snapshot=snapshot, memory=memory)

    # --- resume ---

    async def _resume(self, row: Row[Any], *, reason: str, incomplete: bool) -> Row[Any] | None:
        await self._gateway.health()  # without it the guest could not be thawed, and the memory would lie idle
        self._scheduler.hold(row.id, node=row.node, amount=whole_of(row), action=f"resume sandbox {row.id}")
        resuming = await self._advance(row, Verb.RESUME)
        if resuming is None:
            if SandboxState((await self._reload(row)).state) not in LIVE_STATES:
                self._scheduler.release(row.id)
            return None
        policy = await self._networks.effective(resuming)
        node = self._scheduler.client(row.node)
        try:
            facts = await node.resume(
                row.id,
                generation=row.generation,
                network=policy,
                labels=row.receipt and row.receipt["labels"],
                incomplete=incomplete,
            )
        except CpuosError as error:
            facts = await self._look(resuming, action="resume sandbox")
            if facts.paused:
                raise await self._not_resumed(resuming, error, why=error.why or error.what) from error
        return await self._thaw(resuming, facts, reason=reason, incomplete=incomplete)

    async def _thaw(self, row: Row[Any], facts: SandboxFacts, *, reason: str, incomplete: bool = False) -> Row[Any]:
        """Its processes are there again: let them go on, if all are."""
        node = self._scheduler.client(row.node)
        missing: list[str] = []
        if not facts.settled:
            try:
                missing = await self._reach(row, incomplete=incomplete)
            except Unavailable:
                raise  # whether it goes on is not known: the reconciler asks again
            except CpuosError as error:
                frozen = missing_of(error) is not None
                try:
                    await node.repause(row.id, generation=row.generation, frozen=frozen)
                except CpuosError:
                    await self._look(row, action="resume sandbox")  # it may have been killed meanwhile
                    raise
                raise await self._not_resumed(row, error, why=error.what) from error
            # From here on its memory is newer than what was saved. Before it is on record as running what was saved
            # must be gone, so that no failure ever takes it up again.
            try:
                await node.settle(row.id, generation=row.generation)
            except CpuosError:
                await self._look(row, action="resume sandbox")
                raise

        def changes(current: Row[Any], now: datetime) -> dict[str, Any]:
            left_s = current.timeout_s if current.left_s is None else current.left_s
            ended = {"expires_at": now + timedelta(seconds=left_s), "paused_at": None, "left_s": None}
            return {**ended, **resumed(current, facts, missing=missing)}

        running = await self._advance(row, Verb.RESUMED, changes, note="sandbox.resume", reason=reason)
        if running is None:
            raise await self._ended(row, action="resume sandbox")
        if running.restore_incomplete:
            await self._note_incomplete(running)
        if running.network_applied < running.network_version:
            await self._networks.tell(running)
        _log.info("sandbox resumed", sandbox=row.id, reason=reason)
        return running

    async def _note_incomplete(self, row: Row[Any]) -> None:
        async with self._database.write() as connection:
            await self._audit.note(
                connection,
                workspace=row.workspace,
                actor=SYSTEM,
                action="sandbox.restore_incomplete",
                target=row.id,
                sandbox=row.id,
                result=AuditResult.OK,
                detail={"reason": row.reason, "missing": row.restore_incomplete},
            )

    async def _reach(self, row: Row[Any], *, incomplete: bool = True) -> list[str]:
        """The gateway's attach thaws it. Asked twice: an agent that only answered late has thawed, and says so then.
        The list is what it lacks of what it had."""
        for attempt in (1, 2):
            try:
                return await self._gateway.attach(
                    row.id,
                    generation=row.generation,
                    hostname=hostname_of(row),
                    wait_s=self._wait_s,
                    incomplete=incomplete,
                )
            except CpuosError as error:
                if attempt == 2 or missing_of(error) is not None:
                    raise
        raise AssertionError("unreachable")

    async def _not_resumed(self, row: Row[Any], error: CpuosError, *, why: str) -> CpuosError:
        """It is paused as before: on record, and the error that says so."""
        missing = missing_of(error)
        if missing is not None:
            why = not_all(missing, verb="it would go on")
        await self._repaused(row, reason=f"it could not be resumed: {why}", missing=missing)
        told = _told(error, f"cannot resume sandbox {row.id}: it stays paused")
        if missing is None:
            return told
        hint = f"cpuos resume {row.id}; or without what is missing: cpuos resume --incomplete {row.id}"
        return Conflict(told.what, why, code=error.code, hint=hint, details={"missing": missing})

    async def _repaused(self, row: Row[Any], *, reason: str, missing: list[str] | None = None) -> None:
        def changes(current: Row[Any], now: datetime) -> dict[str, Any]:
            return {"reason": reason, "restore_incomplete": missing}

        changed = await self._advance(row, Verb.REPAUSE, changes)
        if changed is not None:
            self._scheduler.park(row.id)
            if missing:
                await self._note_incomplete(changed)
            _log.warning("sandbox not resumed", sandbox=row.id, reason=reason)

    # --- what was left ---

    async def _finish(self, row: Row[Any]) -> None:
        row = await self._reload(row)
        state = SandboxState(row.state)
        if state not in (S.PAUSING, S.PAUSED, S.RESUMING, S.RUNNING):
            return
        facts = await self._look(row, action="go on with sandbox")
        match state:
            case S.PAUSING if facts.paused:
                await self._paused(row, reason=row.reason)
            case S.PAUSING:
                await self._run_on(row, frozen=True)
            case S.RESUMING if facts.paused:
                await self._repaused(row, reason=facts.pause_reason or "its resume was cut off")
            case S.RESUMING:
                await self._thaw(row, facts, reason="")
            case S.PAUSED if not facts.paused:
                # A resume that was given up came to the node late. Nobody has thawed it.
                await self._scheduler.client(row.node).repause(row.id, generation=row.generation)
            case S.RUNNING if facts.paused:
                pausing = await self._advance(row, Verb.PAUSE)
                if pausing is not None:
                    reason = facts.pause_reason or "the node paused it"
                    await self._paused(pausing, reason=reason, since=facts.paused_at)

    async def _look(self, row: Row[Any], *, action: str) -> SandboxFacts:
        """What the node has of it. One that is dead or gone is lost by this."""
        try:
            facts = await self._scheduler.client(row.node).get(row.id)
        except NotFound:
            facts = None
        if facts is not None and facts.alive and facts.generation == row.generation:
            return facts
        await self._lifecycle.lose(row, reason=facts.exit_reason if facts else "the node has it no more")
        raise await self._ended(row, action=action)

    async def _ended(self, row: Row[Any], *, action: str) -> CpuosError:
        """It was ended while it moved; the gateway may have been told of that before it was told to go on."""
        current = await self._reload(row)
        state = SandboxState(current.state)
        if state not in LIVE_STATES:
            await self._lifecycle.detach(current)
        if state is S.RUNNING:
            return SandboxGone(f"cannot {action}: sandbox {row.id} was moved by another meanwhile")
        return unusable(row.id, state, reason=current.reason, action=action)

    async def _advance(
        self,
        row: Row[Any],
        verb: Verb,
        changes: Callable[[Row[Any], datetime], dict[str, Any]] = lambda current, now: {},
        *,
        note: str = "",
        reason: str = "",
    ) -> Row[Any] | None:
        """Change the state, and what depends on fields that calls change meanwhile. With a `reason` nobody asked for
        it: the audit has a note of it."""
        now = self._clock()
        async with self._database.write() as connection:
            current = await row_of(connection, row.id)
            assert current is not None  # records are never removed
            changed = await advance(connection, row, verb=verb, now=now, **changes(current, now))
            if changed is not None and note and reason:
                await self._audit.note(
                    connection,
                    workspace=row.workspace,
                    actor=SYSTEM,
                    action=note,
                    target=row.id,
                    sandbox=row.id,
                    result=AuditResult.OK,
                    detail={"reason": reason},
                )
        return changed

    async def _reload(self, row: Row[Any]) -> Row[Any]:
        async with self._database.read() as connection:
            current = await row_of(connection, row.id)
        assert current is not None  # records are never removed
        return current


def _told(error: CpuosError, what: str) -> CpuosError:
    """The error of a part, as the outcome of the verb."""
    return type(error)(
        what, ": ".join(part for part in (error.what, error.why) if part), code=error.code, hint=error.hint
    )
