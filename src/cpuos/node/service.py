"""The verbs of a node. Each changes the host in steps that can be undone; the journal is on disk before a process
starts or ends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from cpuos.errors import CapacityExceeded, Conflict, CpuosError, PlatformError, SandboxGone
from cpuos.node.assembly import Assembly
from cpuos.node.changes import ChangeFeed
from cpuos.node.identity import NodeIdentity, SignedStatement
from cpuos.node.journal import Journal, Record, Stage
from cpuos.node.recovery import HOST_RESTARTED, Recovery, decide
from cpuos.node.refusals import could_not, sandbox_not_found, stale_generation
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.steps import Checkpoint, Step, Together, UndoFailed, run_steps
from cpuos.node.templates import Template, Templates
from cpuos.runtimes.base import GuestLink, Probe, Process, Runtime
from cpuos.types.network import EffectivePolicy
from cpuos.types.node import NodeSandboxCreate, SandboxFacts, SandboxStats

__all__ = ["NodeService", "Opened"]

log = structlog.get_logger("cpuos.node")

SWEEP_S = 5.0
WATCH_RETRY_S = 1.0
# Well below the time that a dialling gateway gives the node for its answer.
DIAL_WAIT_S = 5.0
# How long a deleted sandbox's mark refuses late repeats of its create: far over every time limit of a call.
GONE_KEPT = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One dial: a socket to the agent, and what proves to it that the node asks."""

    link: GuestLink
    signed: SignedStatement
    session_key: bytes


class NodeService:
    """What the node knows and does. It runs on one loop; the lock of a sandbox guards its record and its parts."""

    def __init__(
        self,
        *,
        assembly: Assembly,
        journal: Journal,
        identity: NodeIdentity,
        templates: Templates,
        runtimes: RuntimeTable,
        boot_id: str,
        max_sandboxes: int,
        checkpoint: Checkpoint = lambda point: None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._assembly = assembly
        self._journal = journal
        self._identity = identity
        self._templates = templates
        self._runtimes = runtimes
        self._boot_id = boot_id
        self._max_sandboxes = max_sandboxes
        self._checkpoint = checkpoint
        self._clock = clock
        self._records: dict[str, Record] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._creates: dict[str, asyncio.Task[SandboxFacts]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self.changes = ChangeFeed()

    # verbs

    async def create(self, request: NodeSandboxCreate) -> SandboxFacts:
        """Returns when the sandbox's process runs. A repeat joins the first call or answers the same facts."""
        if self._answers_already(request):
            return await self.get(request.id)
        template = self._templates.get(request.template)
        runtime, probe = await self._runtimes.get(request.runtime)
        if self._answers_already(request):  # another call may have come while the runtime was probed
            return await self.get(request.id)
        self._check_room(request)
        record = self._new_record(request, template, probe=probe)
        self._records[record.id] = record
        task = self._spawn(self._create(record, runtime, template=template))
        self._creates[record.id] = task
        return await self._join_create(record.id, task)

    async def get(self, sandbox_id: str) -> SandboxFacts:
        """Facts of one sandbox; of one that is being created, once that has ended."""
        creating = self._creates.get(sandbox_id)
        if creating is not None:
            return await self._join_create(sandbox_id, creating)
        record = self._records.get(sandbox_id)
        if record is None or record.stage in (Stage.GONE, Stage.CREATING):
            raise sandbox_not_found(sandbox_id)
        return _facts(record)

    def list(self) -> list[SandboxFacts]:
        """All sandboxes but those that are being created."""
        hidden = (Stage.CREATING, Stage.GONE)
        return [_facts(record) for record in self._records.values() if record.stage not in hidden]

    async def delete(self, sandbox_id: str, *, generation: int) -> None:
        """Idempotent. Ends a create that is going on, and leaves a mark that refuses late repeats of it."""
        record = self._records.get(sandbox_id)
        if record is None or record.stage is Stage.GONE:
            return
        if generation < record.generation:
            raise stale_generation(sandbox_id, asked=generation, known=record.generation)
        # A task of its own: a caller that hangs up does not leave a delete half done.
        await asyncio.shield(self._spawn(self._delete(record)))

    async def update_network(self, sandbox_id: str, *, generation: int, policy: EffectivePolicy) -> None:
        """Put a policy in force, unless a newer one is already; what it forbids is cut. May be repeated."""
        creating = self._creates.get(sandbox_id)
        if creating is not None:
            await self._join_create(sandbox_id, creating)
        # A task of its own: a caller that hangs up does not leave it half done.
        await asyncio.shield(self._spawn(self._update_network(sandbox_id, generation=generation, policy=policy)))

    async def stats(self, sandbox_id: str) -> SandboxStats:
        record = self._running(sandbox_id)
        measured = await self._runtime_of(record).stats(sandbox_id)
        return SandboxStats(
            id=sandbox_id,
            memory_bytes=measured.memory_bytes,
            cpu_seconds=measured.cpu_seconds,
            processes=measured.processes,
            disk_used_bytes=await self._assembly.disks.used_bytes(sandbox_id),
        )

    async def dial(self, sandbox_id: str, *, generation: int) -> Opened:
        """A socket to the agent of a running sandbox of exactly this generation; one that is being created is waited
        for, but not for longer than `DIAL_WAIT_S`."""
        record = self._records.get(sandbox_id)
        creating = self._creates.get(sandbox_id)
        if creating is not None and record is not None and record.generation == generation:
            await asyncio.wait([creating], timeout=DIAL_WAIT_S)
        record = self._running(sandbox_id)
        if generation != record.generation:
            raise stale_generation(sandbox_id, asked=generation, known=record.generation)
        key = bytes.fromhex(record.session_key)
        hostname = record.request.hostname
        signed = self._identity.sign_statement(sandbox_id, generation, session_key=key, hostname=hostname)
        return Opened(link=await self._assembly.slots.guest_link(sandbox_id), signed=signed, session_key=key)

    # create

    def _answers_already(self, request: NodeSandboxCreate) -> bool:
        """Whether the sandbox is known with exactly these values; refuses what its generation forbids."""
        record = self._records.get(request.id)
        if record is None or (request.generation > record.generation and record.stage is Stage.GONE):
            return False
        if request.generation < record.generation:
            raise stale_generation(request.id, asked=request.generation, known=record.generation)
        # A repeat may carry a policy that is newer by now: that has a verb of its own.
        known = record.request.model_copy(update={"network": request.network})
        if request == known and record.stage not in (Stage.DELETING, Stage.GONE):
            return True
        code = "wrong_state"
        if request.generation > record.generation:
            why = f"its generation {record.generation} is still {record.stage}; delete that first"
        elif record.stage in (Stage.DELETING, Stage.GONE):
            why, code = f"its generation {record.generation} was deleted", "stale_generation"
        else:
            why = f"its generation {record.generation} is {record.stage} with other values"
        raise Conflict(f"cannot create sandbox: {request.id}", why, code=code)

    def _check_room(self, request: NodeSandboxCreate) -> None:
        held = sum(not record.ended for record in self._records.values())
        if held >= self._max_sandboxes:
            raise CapacityExceeded(
                f"cannot create sandbox: {request.id}",
                f"this node holds {held} sandboxes and max_sandboxes is {self._max_sandboxes}",
                details={"limit": "max_sandboxes", "value": self._max_sandboxes},
            )

    def _new_record(self, request: NodeSandboxCreate, template: Template, *, probe: Probe) -> Record:
        return Record(
            request=request,
            stage=Stage.CREATING,
            boot_id=self._boot_id,
            changed_at=self._clock(),
            session_key=secrets.token_hex(32),
            template_digest=template.digest,
            isolation=probe.isolation,
            isolation_detail=probe.detail,
        )

    async def _join_create(self, sandbox_id: str, task: asyncio.Task[SandboxFacts]) -> SandboxFacts:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # the caller went away; the create goes on
            raise Conflict(f"cannot create sandbox: {sandbox_id}", "it was deleted meanwhile") from None

    async def _create(self, record: Record, runtime: Runtime, *, template: Template) -> SandboxFacts:
        spec = self._assembly.spec_of(record, template_image=template.image)
        try:
            async with self._lock(record.id):
                await self._create_in_steps(record, self._assembly_steps(record, spec, runtime))
                log.info("sandbox created", sandbox=record.id, generation=record.generation)
                return self._now_running(self._records[record.id], runtime)
        finally:
            self._creates.pop(record.id, None)

    def _assembly_steps(self, record: Record, spec: Any, runtime: Runtime) -> list[Step | Together]:
        async def started(process: Process) -> None:
            nonlocal record
            record = record.becomes(Stage.RUNNING, process=process, started_at=self._clock(), changed_at=self._clock())

        # Neither is waited for on its way to the volume. A restarted daemon reads it from the page cache; with the host
        # the process dies, and what lies on the volume without a record is an orphan.
        recorded = Step(name="record", do=lambda: self._keep(record, sync=False), undo=lambda: self._forget(record.id))
        return [
            Together(steps=[recorded, *self._assembly.part_steps(spec, network=record.policy)]),
            self._assembly.start_step(spec, runtime, started=started),
            Step(name="running", do=lambda: self._keep(record, sync=False)),
        ]

    async def _create_in_steps(self, record: Record, steps: list[Step | Together]) -> None:
        try:
            await run_steps("create", steps, checkpoint=self._checkpoint)
        except UndoFailed as error:
            # What is left on the host has an owner until the sweeper has removed it.
            await self._keep(record.becomes(Stage.DELETING, exit_reason="its create failed"))
            raise could_not("create", record.id, error.__cause__ or error) from error
        except Exception as error:
            raise could_not("create", record.id, error) from error

    # delete

    async def _delete(self, asked: Record) -> None:
        creating = self._creates.get(asked.id)
        if creating is not None:
            creating.cancel()
            await asyncio.wait([creating])
        async with self._lock(asked.id):
            record = self._records.get(asked.id)
            if record is None:  # its create was undone; the mark refuses a late repeat
                await self._keep(self._gone(asked))
            elif record.stage is not Stage.GONE:
                await self._remove(record)

    async def _remove(self, record: Record) -> None:
        record = record.becomes(
            Stage.DELETING, exit_reason=record.exit_reason or "it was deleted", changed_at=self._clock()
        )
        self._unwatch(record.id)
        steps = [
            Step(name="record", do=lambda: self._keep(record)),
            *self._end_steps(record),
            Step(name="gone", do=lambda: self._keep(self._gone(record))),
        ]
        try:
            await run_steps("delete", steps, checkpoint=self._checkpoint)
        except Exception as error:
            raise could_not("delete", record.id, error) from error
        self.changes.publish(_facts(record))
        log.info("sandbox deleted", sandbox=record.id, generation=record.generation)

    def _end_steps(self, record: Record) -> list[Step]:
        runtime = self._runtimes.find(record.request.runtime)
        return self._assembly.end_steps(record.id, runtimes=[runtime] if runtime is not None else [])

    # network

    async def _update_network(self, sandbox_id: str, *, generation: int, policy: EffectivePolicy) -> None:
        async with self._lock(sandbox_id):
            record = self._running(sandbox_id)
            if generation != record.generation:
                raise stale_generation(sandbox_id, asked=generation, known=record.generation)
            if policy.version < record.policy.version:
                return
            steps = [
                Step(name="record", do=lambda: self._keep(record.becomes(record.stage, network=policy))),
                Step(name="apply", do=lambda: self._assembly.slots.update(sandbox_id, policy)),
            ]
            try:
                await run_steps("network", steps, checkpoint=self._checkpoint)
            except Exception as error:
                raise could_not("change the network of", sandbox_id, error) from error

    # death

    def _now_running(self, record: Record, runtime: Runtime) -> SandboxFacts:
        self._watches[record.id] = self._spawn(self._watch(record, runtime))
        facts = _facts(record)
        self.changes.publish(facts)
        return facts

    async def _watch(self, record: Record, runtime: Runtime) -> None:
        while True:
            try:
                reason = await runtime.wait(record.id)
                break
            except Exception:
                log.exception("watch failed", sandbox=record.id)
                await asyncio.sleep(WATCH_RETRY_S)
                if not await self._adopt(record, runtime):
                    reason = "its process is gone"
                    break
        async with self._lock(record.id):
            current = self._records.get(record.id)
            if current is not None and current.stage is Stage.RUNNING and current.generation == record.generation:
                await self._end(current, reason=reason)

    async def _end(self, record: Record, *, reason: str) -> None:
        """Report the death first, then take away what is left on the host."""
        record = record.becomes(Stage.DEAD, exit_reason=record.exit_reason or reason, changed_at=self._clock())
        await self._keep(record)
        self.changes.publish(_facts(record))
        log.warning("sandbox died", sandbox=record.id, generation=record.generation, reason=record.exit_reason)
        try:
            await run_steps("end", self._end_steps(record), checkpoint=self._checkpoint)
            await self._keep(record.becomes(Stage.DEAD, ended=True))
        except Exception:
            log.exception("sandbox not cleaned yet", sandbox=record.id)

    def _unwatch(self, sandbox_id: str) -> None:
        watch = self._watches.pop(sandbox_id, None)
        if watch is not None:
            watch.cancel()

    # the daemon's start and end

    async def recover(self) -> None:
        """Make host and journal agree again, however the last daemon ended. Runs before any call is taken."""
        await self._assembly.slots.start()
        loaded = await asyncio.to_thread(self._journal.load)
        self._records.update((record.id, record) for record in loaded.records)
        await asyncio.gather(*(self._recover(record) for record in list(self._records.values())))
        await self._remove_orphans()

    async def _recover(self, record: Record) -> None:
        decision = decide(record, boot_id=self._boot_id)
        log.info("sandbox found", sandbox=record.id, generation=record.generation, decision=decision)
        runtime = self._runtimes.find(record.request.runtime)
        try:
            async with self._lock(record.id):
                if decision is Recovery.ADOPT:
                    if runtime is not None and await self._adopt(record, runtime):
                        self._now_running(record, runtime)
                    else:
                        await self._end(record, reason="its process ended while the node daemon was down")
                elif decision is Recovery.END:
                    reason = HOST_RESTARTED if record.boot_id != self._boot_id else "its process is gone"
                    await self._end(record, reason=reason)
                elif decision is Recovery.DELETE:
                    await self._remove(record)
                elif decision is Recovery.UNDO:
                    await run_steps("undo", self._end_steps(record), checkpoint=self._checkpoint)
                    await self._forget(record.id)
        except Exception:
            log.exception("sandbox not recovered yet", sandbox=record.id)
            if decision is Recovery.UNDO:
                await self._keep(record.becomes(Stage.DELETING, exit_reason="its create failed"))

    async def _adopt(self, record: Record, runtime: Runtime) -> bool:
        if record.process is None:
            return False
        try:
            await self._assembly.slots.readopt(record.id, record.policy)
        except PlatformError as error:
            log.error("network slot not found again", sandbox=record.id, why=error.why)
            return False
        image = self._templates.image_path(record.request.template)
        return await runtime.adopt(self._assembly.spec_of(record, template_image=image), record.process)

    async def _remove_orphans(self) -> None:
        """What is on the host under this instance's names and no record owns."""
        for sandbox_id in sorted(await self._assembly.leftovers()):
            record = self._records.get(sandbox_id)  # looked up last: a create may have begun meanwhile
            if record is not None and not record.ended:
                continue
            log.warning("orphan found", sandbox=sandbox_id)
            try:
                steps = self._assembly.end_steps(sandbox_id, runtimes=list(self._runtimes))
                await run_steps("orphan", steps, checkpoint=self._checkpoint)
            except Exception:
                log.exception("orphan not removed", sandbox=sandbox_id)

    def start(self) -> None:
        """Probe the runtimes, stock up, and begin to try again, now and then, what could not be removed."""
        self._runtimes.start()
        self._assembly.disks.start()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        """One round: what could not be taken up at the start, what is dead or being deleted and still has parts here,
        marks that are old, and orphans: a start of this daemon's forerunner may have ended after `recover` looked."""
        oldest = self._clock() - GONE_KEPT
        for record in list(self._records.values()):
            if self._lock(record.id).locked():
                continue
            if record.stage is Stage.GONE and record.changed_at < oldest:
                await self._forget(record.id)
                self._locks.pop(record.id, None)
            elif record.stage is Stage.RUNNING and record.id not in self._watches:
                await self._recover(record)
            elif record.stage is Stage.DELETING or (record.stage is Stage.DEAD and not record.ended):
                async with self._lock(record.id):
                    try:
                        await (self._remove(record) if record.stage is Stage.DELETING else self._end(record, reason=""))
                    except CpuosError:
                        log.exception("sandbox not removed yet", sandbox=record.id)
        await self._remove_orphans()

    async def close(self) -> None:
        """Finish what goes on and let go. Sandboxes run on."""
        ending = [self._sweeper, *self._watches.values()]
        for task in ending:
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._tasks, *(task for task in ending if task is not None), return_exceptions=True)
        await self._assembly.disks.close()
        await self._assembly.slots.close()
        await self._runtimes.close()

    # records

    async def _keep(self, record: Record, *, sync: bool = True) -> None:
        """In the journal first, then in memory."""
        if sync:
            await asyncio.to_thread(self._journal.write, record)
        else:
            self._journal.write(record, sync=False)  # into the page cache: a thread would take longer
        self._records[record.id] = record

    async def _forget(self, sandbox_id: str) -> None:
        await asyncio.to_thread(self._journal.remove, sandbox_id)
        self._records.pop(sandbox_id, None)

    def _gone(self, record: Record) -> Record:
        return record.becomes(Stage.GONE, ended=True, changed_at=self._clock(), session_key="", process=None)

    def _lock(self, sandbox_id: str) -> asyncio.Lock:
        return self._locks.setdefault(sandbox_id, asyncio.Lock())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller; one that went away leaves nobody to ask

    def _running(self, sandbox_id: str) -> Record:
        record = self._records.get(sandbox_id)
        if record is None or record.stage is Stage.GONE:
            raise sandbox_not_found(sandbox_id)
        if record.stage in (Stage.DEAD, Stage.DELETING):
            raise SandboxGone(f"cannot reach sandbox: {sandbox_id}", record.exit_reason)
        if record.stage is Stage.CREATING:
            raise Conflict(f"cannot reach sandbox: {sandbox_id}", "it is still being created")
        return record

    def _runtime_of(self, record: Record) -> Runtime:
        runtime = self._runtimes.find(record.request.runtime)
        if runtime is None:
            raise PlatformError(f"cannot reach sandbox: {record.id}", f"no runtime {record.request.runtime!r} here")
        return runtime


def _facts(record: Record) -> SandboxFacts:
    return SandboxFacts(
        id=record.id,
        generation=record.generation,
        alive=record.stage is Stage.RUNNING,
        exit_reason=record.exit_reason,
        runtime=record.request.runtime,
        isolation=record.isolation,
        isolation_detail=record.isolation_detail,
        template=record.request.template,
        template_digest=record.template_digest,
        started_at=record.started_at,
    )
