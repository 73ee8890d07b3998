"""The verbs of a sandbox: create, kill, lose, update. One function a verb; each is safe to repeat after a crash.

Order of a create: room is reserved, the record is written, the node makes it while the gateway waits for its agent, the
record says `running`. What fails is undone in the reverse order. No network call happens inside a transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row
from sqlalchemy.exc import IntegrityError

from cpuos.errors import Conflict, CpuosError, NotFound, PlatformError, SandboxGone, SetupRequired, Unavailable
from cpuos.scheduler.base import Demand, Placement, Scheduler
from cpuos.server.asks import demand_of_request, first_record, hostname_of, new_id, node_request, what_is_missing
from cpuos.server.audit import SYSTEM, Audit
from cpuos.server.clock import Clock
from cpuos.server.creation import Creation, undoing
from cpuos.server.db.database import Database
from cpuos.server.db.sandboxes import advance, insert_sandbox, row_of, update_fields
from cpuos.server.decide import session_over
from cpuos.server.gateway import GatewayControl
from cpuos.server.losses import given_up, recreated
from cpuos.server.network import Networks
from cpuos.server.packs import Packs
from cpuos.server.quotas import Quotas
from cpuos.server.states import Verb, next_state, sources, unusable
from cpuos.server.tasks import Tasks
from cpuos.server.templates.names import Meaning, TemplateNames
from cpuos.types.audit import AuditResult
from cpuos.types.node import SandboxFacts
from cpuos.types.sandbox import Isolation, SandboxCreate, SandboxState, SandboxUpdate

__all__ = ["EMULATED_FACTOR", "Lifecycle"]

_log = structlog.get_logger("cpuos.server.lifecycle")
Rescue = Callable[[Row[Any]], Awaitable[bool]]
Begin = Callable[[datetime], Awaitable[Row[Any]]]
EMULATED_FACTOR = 3
"""So much longer a guest may take to come up whose every instruction is translated."""


class _IdTaken(Exception):
    """Another server was given the same ready sandbox, and has it on record."""


class _NotReady(Exception):
    """The ready sandbox that the scheduler chose was given up since, or has died."""


class Lifecycle:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        gateway: GatewayControl,
        networks: Networks,
        templates: TemplateNames,
        packs: Packs,
        audit: Audit,
        quotas: Quotas,
        tasks: Tasks,
        clock: Clock,
        create_deadline_s: float,
        agent_wait_s: float,
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._gateway = gateway
        self._networks = networks
        self._templates = templates
        self._packs = packs
        self._audit = audit
        self._quotas = quotas
        self._tasks = tasks
        self._clock = clock
        self._create_deadline = timedelta(seconds=create_deadline_s)
        self._agent_wait_s = agent_wait_s
        self._creations: dict[str, Creation] = {}
        self._rescue: Rescue | None = None

    def rescue_by(self, rescue: Rescue) -> None:
        """What keeps the files of one that was lost before its node removes them; False while it could not yet."""
        self._rescue = rescue

    def creation(self, sandbox_id: str) -> Creation | None:
        """The create of this sandbox, while this process works on it."""
        return self._creations.get(sandbox_id)

    # --- create ---

    async def create(
        self,
        request: SandboxCreate,
        *,
        workspace: str,
        actor: str,
        intent: int | None = None,
        begun: Callable[[str], None] = lambda sandbox_id: None,
        origin: Row[Any] | None = None,
        meaning: Meaning | None = None,
    ) -> Row[Any]:
        """A running sandbox, or an error and nothing left of it. `begun` is called when it is on record; `origin` is
        the snapshot that it begins with, `meaning` the image of its template where that has no name yet."""
        meaning = meaning or await self._templates.resolve(workspace, request.template, origin=origin)
        packs = await self._packs.resolve(workspace, request.packs, origin=origin)
        sandbox_id = new_id()
        placement = await self._reserve(sandbox_id, demand_of_request(request, meaning.on_node, origin=origin))
        sandbox_id = placement.ready or sandbox_id
        try:
            async with self._at_work(sandbox_id) as (creation, undo):
                row = await self._insert(
                    sandbox_id,
                    request,
                    placement=placement,
                    meaning=meaning,
                    packs=packs,
                    workspace=workspace,
                    actor=actor,
                    intent=intent,
                )
                begun(sandbox_id)
                if placement.ready is not None:
                    try:
                        async with undoing() as untake:
                            return await self._make(row, origin=origin, creation=creation, undo=untake, ready=True)
                    except _NotReady:
                        row = await self._begin_cold(row)
                return await self._make(row, origin=origin, creation=creation, undo=undo)
        except _IdTaken:
            who = {"workspace": workspace, "actor": actor, "intent": intent}
            return await self.create(request, **who, begun=begun, origin=origin, meaning=meaning)

    async def recreate(self, row: Row[Any], demand: Demand, *, origin: Row[Any], begin: Begin) -> Row[Any]:
        """A lost one runs again, from what `origin` kept of it; or an error and it is lost as before. `begin` writes
        on record, with the deadline that it is given, that it is made anew."""
        await self._reserve(row.id, demand)
        async with self._at_work(row.id) as (creation, undo):
            row = await begin(self._clock() + self._create_deadline)
            return await self._make(row, origin=origin, creation=creation, undo=undo)

    async def finish_create(self, row: Row[Any], facts: SandboxFacts) -> None:
        """Bring a create to its end that an earlier server process began and whose sandbox runs on the node."""
        async with self._at_work(row.id) as (creation, undo):
            undo.push_async_exit(self._fail_unless_kept(row))
            undo.push_async_callback(self._remove_from_node, row)
            undo.push_async_callback(self._forget_quietly, row)
            async with self._attaching(row) as attached:
                await self._start(row, facts, attached=attached, creation=creation)

    async def fail_create(self, row: Row[Any], *, reason: str) -> None:
        """End a create that no process works on any more."""
        error = PlatformError("cannot create sandbox: it was not made", reason, code="node_unavailable")
        await self._forget_quietly(row)
        await self._remove_from_node(row)
        await self._record_failure(row, error)
        self._scheduler.release(row.id)

    # --- end ---

    async def kill(self, row: Row[Any], *, reason: str) -> Row[Any]:
        """Stop it from whatever live state; return when nothing of it is left. Ended ones stay as they are."""
        while (state := SandboxState(row.state)) in sources(Verb.STOP):
            async with self._database.write() as connection:
                changed = await advance(connection, row, verb=Verb.STOP, now=self._clock(), reason=reason)
            row = changed or await self._reload(row)
        if state is SandboxState.STOPPING:
            row = await asyncio.shield(self.finish_stop(row))
        return row

    def finish_stop(self, row: Row[Any]) -> asyncio.Task[Row[Any]]:
        """The work that makes `stopping` end; callers at the same time share it."""
        return self._tasks.share(row.id, "stop", self._stop(row))

    async def expire(self, row: Row[Any], *, reason: str) -> None:
        """Its time ended, unless it was given more at the last moment."""
        now = self._clock()
        async with self._database.write() as connection:
            current = await row_of(connection, row.id)
            if current is None or current.expires_at is None or current.expires_at > now:
                return
            if next_state(SandboxState(current.state), Verb.STOP) is None:
                return
            stopping = await advance(connection, current, verb=Verb.STOP, now=now, reason=reason)
            assert stopping is not None  # nothing else writes within this transaction
            await self._note(connection, stopping, action="sandbox.expire", detail={"reason": reason})
        await self.finish_stop(stopping)

    async def lose(self, row: Row[Any], *, reason: str) -> None:
        """It died: say so first, then tidy up."""
        creation = self._creations.get(row.id)
        if creation is not None:
            creation.abandon(reason)
            return
        async with self._database.write() as connection:
            now = self._clock()
            told = {"reason": reason, "lost_at": now, "lost_reason": reason}
            changed = await advance(connection, row, verb=Verb.LOSE, now=now, **told)
            if changed is None:
                return
            await self._note(connection, changed, action="sandbox.lost", detail={"reason": reason})
        _log.warning("sandbox lost", sandbox=row.id, reason=reason)
        self._scheduler.release(row.id)
        await self.detach(changed)
        if self._rescue is None or await self._rescue(changed):
            await self._remove_from_node(changed)  # else the reconciler does both

    async def detach(self, row: Row[Any]) -> None:
        """Tell the gateway that an ended sandbox has ended; the reconciler repeats it until it was heard."""
        lost = row.state == SandboxState.LOST.value
        try:
            reason = "lost" if lost else "stopped"
            await self._gateway.detach(row.id, reason=reason, text=row.reason, generation=row.generation)
        except CpuosError as error:
            _log.warning("gateway not told of an end", sandbox=row.id, error=str(error))
            return
        await self._set_gateway_stage(row, "detached")

    async def forget(self, row: Row[Any]) -> None:
        """Let the gateway remove the recorded output of a sandbox that ended long ago."""
        await self._gateway.forget(row.id, generation=row.generation)
        await self._set_gateway_stage(row, "forgotten")

    # --- update ---

    async def update(self, row: Row[Any], request: SandboxUpdate) -> Row[Any]:
        """New length of session or labels of a live sandbox."""
        while True:
            state = SandboxState(row.state)
            if state not in sources(Verb.STOP):
                raise unusable(row.id, state, reason=row.reason, action="update sandbox")
            changes: dict[str, Any] = {}
            if request.timeout_s is not None:
                changes["timeout_s"] = request.timeout_s
                if row.paused_at is None:
                    changes["expires_at"] = self._clock() + timedelta(seconds=request.timeout_s)
                else:
                    changes["left_s"] = request.timeout_s
            if request.labels is not None:
                changes["labels"] = request.labels
            if not changes:
                return row
            async with self._database.write() as connection:
                changed = await update_fields(connection, row, **changes)
            if changed is not None:
                return changed
            row = await self._reload(row)

    # --- the steps ---

    @asynccontextmanager
    async def _at_work(self, sandbox_id: str) -> AsyncIterator[tuple[Creation, AsyncExitStack]]:
        """A create in this process: what was registered is undone when the block raises."""
        creation = self._creations[sandbox_id] = Creation()
        try:
            async with undoing() as undo:
                undo.callback(self._scheduler.release, sandbox_id)
                yield creation, undo
        finally:
            del self._creations[sandbox_id]
            creation.ended.set()

    async def _reserve(self, sandbox_id: str, demand: Demand) -> Placement:
        try:
            return self._scheduler.reserve(sandbox_id, demand)
        except (Unavailable, NotFound, SetupRequired):
            # What is known of the node is some seconds old: it may be back, or have got what was missing.
            await self._scheduler.refresh()
            return self._scheduler.reserve(sandbox_id, demand)

    async def _make(
        self, row: Row[Any], *, origin: Row[Any] | None, creation: Creation, undo: AsyncExitStack, ready: bool = False
    ) -> Row[Any]:
        """On its node, of which it has room from here on; a failure undoes it."""
        self._scheduler.commit(row.id)
        undo.push_async_exit(self._fail_unless_kept(row))
        undo.push_async_callback(self._remove_from_node, row)
        policy = await self._networks.effective(row)
        undo.push_async_callback(self._forget_quietly, row)
        request = node_request(row, policy, origin=origin, ready=ready)
        async with self._attaching(row, starting_s=self._create_deadline.total_seconds()) as attached:
            try:
                facts = await self._scheduler.client(row.node).create(request)
            except Conflict as error:
                if error.code != "sandbox_not_ready":
                    raise
                raise _NotReady from error
            missing = what_is_missing(facts, verb="began", memory=origin is not None and origin.memory)
            return await self._start(row, facts, attached=attached, creation=creation, missing=missing)

    async def _begin_cold(self, row: Row[Any]) -> Row[Any]:
        """As the next generation: whatever still comes for the one that was ready, comes too late."""
        async with self._database.write() as connection:
            anew = await update_fields(connection, row, generation=row.generation + 1)
        if anew is None:
            raise await self._ended_meanwhile(row)
        return anew

    async def _insert(
        self,
        sandbox_id: str,
        request: SandboxCreate,
        *,
        placement: Placement,
        meaning: Meaning,
        packs: dict[str, Any],
        workspace: str,
        actor: str,
        intent: int | None,
    ) -> Row[Any]:
        now = self._clock()
        values = {
            **first_record(sandbox_id, request, placement=placement, meaning=meaning, now=now),
            "packs": packs,
            "workspace": workspace,
            "created_by": actor,
            "intent": intent,
            "deadline_at": now + self._create_deadline,
        }
        try:
            async with self._database.write() as connection:
                await self._quotas.check_sandboxes(connection, workspace)
                return await insert_sandbox(connection, values)
        except IntegrityError as error:
            if await self._is_on_record(sandbox_id):
                self._scheduler.commit(sandbox_id)  # it is not given back: it is another's
                raise _IdTaken from error
            raise Conflict(
                f"cannot create sandbox: the name {request.name!r} is taken",
                "another live sandbox of this workspace has it",
                code="name_taken",
                hint=f"cpuos kill {request.name}, or use another name",
                details={"field": "name", "value": request.name},
            ) from error

    @asynccontextmanager
    async def _attaching(self, row: Row[Any], *, starting_s: float = 0.0) -> AsyncIterator[asyncio.Future[list[str]]]:
        """The gateway on its way to the agent, from now on; called off when the block is left before it is there."""
        attached = asyncio.ensure_future(
            self._gateway.attach(
                row.id,
                generation=row.generation,
                hostname=hostname_of(row),
                wait_s=self._agent_wait_s * (EMULATED_FACTOR if row.isolation == Isolation.EMULATED.value else 1),
                starting_s=starting_s,
            )
        )
        try:
            yield attached
        finally:
            attached.cancel()
            await asyncio.gather(attached, return_exceptions=True)

    async def _start(
        self,
        row: Row[Any],
        facts: SandboxFacts,
        *,
        attached: asyncio.Future[None],
        creation: Creation,
        missing: str = "",
    ) -> Row[Any]:
        if not facts.alive:
            raise _died(row, facts.exit_reason)
        await creation.unless_abandoned(attached, what="create sandbox: it ended before its agent answered")
        now = self._clock()
        async with self._database.write() as connection:
            started = await advance(
                connection,
                row,
                verb=Verb.STARTED,
                now=now,
                started_at=facts.started_at or now,
                runtime=facts.runtime,
                isolation=facts.isolation.value,
                isolation_detail=facts.isolation_detail,
                template_digest=facts.template_digest,
                started_from=facts.started_from.value,
                **{"reason": missing, **recreated(row, facts, now=now)},
            )
        if started is None:
            raise await self._ended_meanwhile(row)
        if started.network_applied < started.network_version:
            await self._networks.tell(started)  # its workspace's policy was changed meanwhile
        _log.info("sandbox running", sandbox=row.id, runtime=facts.runtime, isolation=facts.isolation.value)
        return started

    async def _stop(self, row: Row[Any]) -> Row[Any]:
        creation = self._creations.get(row.id)
        if creation is not None:
            creation.abandon(row.reason)
        try:
            session_s = row.timeout_s if row.reason == session_over(row.timeout_s) else None
            await self._gateway.detach(
                row.id, reason="stopped", text=row.reason, generation=row.generation, session_s=session_s
            )
            stage = "detached"
        except CpuosError as error:
            _log.warning("gateway not told of an end", sandbox=row.id, error=str(error))
            stage = "attached"
        node = self._scheduler.client(row.node)
        await node.delete(row.id, generation=row.generation)
        if creation is not None:
            # Its call to the node may have been under way: what came after the first delete goes with the second.
            await creation.ended.wait()
            await node.delete(row.id, generation=row.generation)
        async with self._database.write() as connection:
            stopped = await advance(connection, row, verb=Verb.STOPPED, now=self._clock(), gateway_stage=stage)
        self._scheduler.release(row.id)
        _log.info("sandbox stopped", sandbox=row.id, reason=row.reason)
        return stopped or await self._reload(row)

    # --- undo and records ---

    def _fail_unless_kept(self, row: Row[Any]) -> Any:
        async def fail(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
            if isinstance(error, CpuosError):
                await self._record_failure(row, error)
            elif error is not None and not isinstance(error, _NotReady):
                fault = PlatformError("cannot create sandbox: a fault of cpuOS", "the server's log has the details")
                await self._record_failure(row, fault)

        return fail

    async def _record_failure(self, row: Row[Any], error: CpuosError) -> None:
        if next_state(SandboxState(row.state), Verb.FAIL) is None:
            return
        reason = ": ".join(part for part in (error.what, error.why) if part)
        verb, changes = Verb.FAIL, {"reason": reason, "gateway_stage": "forgotten"}
        if row.lost_at is not None:
            verb, changes = Verb.GIVE_UP, given_up(row, error)
        async with self._database.write() as connection:
            await advance(connection, row, verb=verb, now=self._clock(), failure=error.body(), **changes)
        _log.warning("sandbox failed", sandbox=row.id, reason=reason)

    async def _remove_from_node(self, row: Row[Any]) -> None:
        try:
            await self._scheduler.client(row.node).delete(row.id, generation=row.generation)
        except CpuosError as error:
            # The reconciler removes what a node still has and no live record owns.
            _log.warning("node not cleaned", sandbox=row.id, error=str(error))

    async def _forget_quietly(self, row: Row[Any]) -> None:
        """It was not made. What is recorded of the commands of one that was lost stays."""
        lost, text = row.lost_at is not None, "it was not made"
        reason = "lost" if lost else "stopped"
        try:
            await self._gateway.detach(row.id, reason=reason, text=text, generation=row.generation)
            if not lost:
                await self._gateway.forget(row.id, generation=row.generation)
        except CpuosError as error:
            _log.warning("gateway not cleaned", sandbox=row.id, error=str(error))

    async def _set_gateway_stage(self, row: Row[Any], stage: str) -> None:
        async with self._database.write() as connection:
            await update_fields(connection, row, gateway_stage=stage)

    async def _is_on_record(self, sandbox_id: str) -> bool:
        async with self._database.read() as connection:
            return await row_of(connection, sandbox_id) is not None

    async def _ended_meanwhile(self, row: Row[Any]) -> SandboxGone:
        current = await self._reload(row)
        what = f"cannot create sandbox: {row.id} was ended while it started"
        return SandboxGone(what, current.reason, code="sandbox_stopped", hint="cpuos create")

    async def _reload(self, row: Row[Any]) -> Row[Any]:
        async with self._database.read() as connection:
            current = await row_of(connection, row.id)
        assert current is not None  # records are never removed
        return current

    async def _note(self, connection: Any, row: Row[Any], *, action: str, detail: dict[str, Any]) -> None:
        await self._audit.note(
            connection,
            workspace=row.workspace,
            actor=SYSTEM,
            action=action,
            target=row.id,
            sandbox=row.id,
            result=AuditResult.OK,
            detail=detail,
        )


def _died(row: Row[Any], reason: str) -> SandboxGone:
    return SandboxGone(f"cannot create sandbox: {row.id} died as it started", reason, hint="cpuos create")
