"""One sandbox as the gateway knows it: attach, suspend, detach, and the start of its commands."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from typing import Any

import structlog

from cpuos.errors import AgentFailure, Conflict, CpuosError, FileProblem, LimitReached, SandboxGone, Unavailable
from cpuos.gateway.activity import Activity, Wakes
from cpuos.gateway.agent.answers import Hello
from cpuos.gateway.agent.client import AgentClient
from cpuos.gateway.agent.connection import AgentTimes
from cpuos.gateway.agent.sockets import Dialler
from cpuos.gateway.commands import CommandRun, start_body
from cpuos.gateway.journal import Journal
from cpuos.gateway.limits import GatewayLimits, Slots
from cpuos.gateway.previews.ports import PublishedPorts
from cpuos.gateway.reached import GuestLimitReader, LimitReader, name_limit
from cpuos.gateway.records import CommandRecord, RecordedCommand, command_begun, new_command_id, shown_argv
from cpuos.gateway.refusals import Refusals
from cpuos.gateway.store import CommandStore
from cpuos.gateway.suspension import Gate, Suspension
from cpuos.gateway.tickets import Ticket
from cpuos.types.command import CommandStart, CommandStatus
from cpuos.types.limits import LimitSource, ReachedLimit, SandboxLimit

__all__ = ["GatewaySandbox"]

CALM_S = 2.0
"""A freeze waits so long for calls that are under way, and cuts what takes longer, but for the start of a command."""
MISSING_PROGRAM = {"program_not_found": 127, "program_not_executable": 126}

log = structlog.get_logger("gateway.sandbox")


class GatewaySandbox:
    """One sandbox: its agent while it lives, its commands, its slots."""

    def __init__(
        self,
        sandbox_id: str,
        *,
        store: CommandStore,
        journal: Journal,
        dialler: Dialler,
        refusals: Refusals | None,
        limit_reader: LimitReader | None,
        limits: GatewayLimits,
        times: AgentTimes,
        wakes: Wakes | None = None,
    ) -> None:
        self.id = sandbox_id
        self.store = store
        self.slots = Slots(limits)
        self.activity = Activity()
        self.gate = Gate(sandbox_id, wakes=wakes or Wakes())
        self.ports = PublishedPorts(store.folder / "ports.json")
        self.runs: dict[str, CommandRun] = {}
        self.generation = 0
        self._asked_generation = 0
        """The highest that anybody wanted attached."""
        self._detached_generation = 0  # who still waits to attach it comes too late
        self.hostname = ""
        self.ended: tuple[CommandStatus, str] | None = None
        """How and why it ended: killed or sandbox_lost."""
        self._journal = journal
        self._dialler = dialler
        self._refusals = refusals
        self._limit_reader = limit_reader
        self._times = times
        self._settled: set[int] = set()
        """Intents of commands not ended in the store whose outcome an earlier process wrote."""
        self._agent: AgentClient | None = None
        self._starting = 0
        self._attaching = asyncio.Lock()
        self._identifying: asyncio.Future[Hello] | None = None
        self._freezing: asyncio.Future[dict[str, Any]] | None = None
        self.hello: Hello | None = None

    # attach and detach

    async def attach(
        self, generation: int, *, hostname: str, wait_s: float, starting_s: float = 0.0, incomplete: bool = False
    ) -> Hello:
        """Make the agent ours and take up its commands. A repeat answers the same; an older generation is refused.

        A suspended sandbox goes on by it, or stays suspended where it fails: so where something of what it had when it
        was suspended is gone, unless it may be `incomplete`.
        """
        self._asked_generation = max(self._asked_generation, generation)
        async with self._attaching:
            if generation < self.generation:
                raise Conflict(
                    f"cannot attach generation {generation} of sandbox {self.id}",
                    f"generation {self.generation} is known",
                    code="stale_generation",
                )
            if generation == self.generation and self.ended is not None:
                raise self.gone()
            if generation <= self._detached_generation:
                raise SandboxGone(f"cannot attach sandbox {self.id}: it was ended meanwhile")
            if generation == self.generation and self.gate.open and self.hello is not None:
                self.activity.touch()  # it may have been ready for long, and is somebody's from now on
                return self.hello
            if generation > self.generation and self.generation and self.ended is None:
                await self.end(CommandStatus.SANDBOX_LOST, "the sandbox was made anew as another generation")
            return await self._attach(
                generation, hostname=hostname, wait_s=wait_s, starting_s=starting_s, incomplete=incomplete
            )

    def is_after(self, generation: int | None) -> bool:
        """It is attached, or about to be, as a later generation than this."""
        return generation is not None and generation < max(self.generation, self._asked_generation)

    async def _attach(
        self, generation: int, *, hostname: str, wait_s: float, starting_s: float, incomplete: bool
    ) -> Hello:
        agent = self._client(generation)
        expected = None if self.gate.suspension is None else self.gate.suspension.told
        if not self.gate.paused:
            self.gate.shut()
        try:
            self._identifying = asyncio.ensure_future(
                agent.identify(wait_s=wait_s, starting_s=starting_s, expected=expected, incomplete=incomplete)
            )
            hello = await self._identifying
            if hello.frozen is not None:  # what it was frozen for did not come about
                await agent.thaw(hello.frozen)
            self.generation, self.hostname, self.ended = generation, hostname, None
            self._save()
            self._agent = agent
            if hello.commands or self.store.running or self.gate.paused:
                await self._take_up(agent)
        except BaseException as error:
            self._agent = None
            for run in self.runs.values():
                run.hold()
            await agent.aclose()
            if isinstance(error, asyncio.CancelledError) and self._identifying.cancelled():
                raise SandboxGone(f"cannot attach sandbox {self.id}: it was ended meanwhile") from None
            raise
        self.hello = hello
        self._go_on()
        log.info(
            "sandbox.attached",
            sandbox=self.id,
            generation=generation,
            incarnation=hello.incarnation,
            commands=len(self.runs),
            not_reseeded=hello.thawed.failed if hello.thawed is not None else [],
        )
        return hello

    def _go_on(self) -> None:
        was_suspended = self.gate.suspension is not None
        self.gate.reopen()
        self.activity.touch()
        if was_suspended:
            self._save()

    def _client(self, generation: int) -> AgentClient:
        return AgentClient(self._dialler, sandbox_id=self.id, generation=generation, times=self._times)

    async def _take_up(self, agent: AgentClient) -> None:
        """After a restart or a suspension: attach to what runs, end what the agent never got, kill what nobody
        recorded."""
        known = {command.id for command in (await agent.commands()).commands}
        for run in list(self.runs.values()):
            run.go_on(agent, known=run.id in known)
        for recorded in self._untaken():
            run = self._run(recorded, agent)
            if recorded.id in known:
                run.recover()
            else:
                run.finish_unstarted()
        for command_id in known - set(self.store.running):
            if self.store.has(command_id):
                agent.forget_command(command_id)
            else:
                agent.kill_command_later(command_id)

    async def suspend(self, freeze: str, *, if_idle_since: float | None, auto_resume: bool) -> dict[str, Any]:
        """Freeze what runs inside, and hold back all calls until the next attach. A repeat answers the same.

        A refusal changes nothing. An `AgentFailure` leaves open what stands still: then an attach is due.
        """
        async with self._attaching:
            if self.ended is not None:
                raise self.gone()
            if (suspension := self.gate.suspension) is not None:
                if suspension.freeze != freeze:
                    raise Conflict(f"cannot suspend sandbox {self.id}: it is suspended by another freeze")
                return suspension.told
            self.gate.check_halted()
            agent = self._agent
            if agent is None or not self.gate.open:
                raise AgentFailure(
                    f"cannot suspend sandbox {self.id}", "its agent is not attached", code="agent_unresponsive"
                )
            if if_idle_since is not None and (self.idle_since is None or self.idle_since > if_idle_since):
                raise Conflict(f"cannot suspend sandbox {self.id}: it is not idle", code="sandbox_busy")
            self.gate.shut(suspending=True)
            self._freezing = asyncio.ensure_future(self._freeze(agent, freeze))
            try:
                told = await self._freezing
            except AgentFailure:
                self.gate.shut()
                self._agent, self.hello = None, None
                await agent.aclose()
                raise
            except BaseException as error:
                for run in self.runs.values():
                    run.go_on(agent, known=True)
                self.gate.reopen()
                if isinstance(error, asyncio.CancelledError) and self._freezing.cancelled():
                    raise SandboxGone(f"cannot suspend sandbox {self.id}: it was ended meanwhile") from None
                raise
            self._agent, self.hello = None, None
            self.gate.suspend(freeze, told, auto_resume=auto_resume)
            self._save()
            await agent.aclose()
            log.info("sandbox.suspended", sandbox=self.id, commands=len(self.runs), processes=told["processes"])
            return told

    async def _freeze(self, agent: AgentClient, freeze: str) -> dict[str, Any]:
        await self.activity.calm(CALM_S)
        if self._starting:
            why = f"a command is being started, and that took over {CALM_S:g} s"
            raise Conflict(f"cannot freeze sandbox {self.id}", why, code="freeze_failed")
        for run in self.runs.values():
            run.hold()
        frozen = await agent.freeze(freeze)
        return frozen.model_dump()

    async def detach(self, status: CommandStatus, reason: str, *, limit: ReachedLimit | None = None) -> None:
        """The sandbox ended: so do its commands and streams; output stays readable. Who waits for its agent is told."""
        self._detached_generation = self._asked_generation
        for waiting in (self._identifying, self._freezing):
            if waiting is not None:
                waiting.cancel()
        async with self._attaching:
            if self.ended is None:
                await self.end(status, reason, limit=limit)
                log.info("sandbox.detached", sandbox=self.id, status=status.value, reason=reason)

    async def end(self, status: CommandStatus, reason: str, *, limit: ReachedLimit | None = None) -> None:
        """What `detach` does once; also where a restart interrupted it."""
        self.ended = (status, reason)
        self.hello = None
        agent, self._agent = self._agent, None
        self._go_on()
        self._save()
        for recorded in self._untaken():
            self._run(recorded, agent or self._client(0))
        for run in list(self.runs.values()):
            run.finish_with_sandbox(status, reason, limit=limit)
        if agent is not None:
            await agent.aclose()

    def _untaken(self) -> list[RecordedCommand]:
        """Running commands that were not taken up since a restart; each is counted as one now."""
        untaken = [recorded for recorded in self.store.running.values() if recorded.id not in self.runs]
        for recorded in untaken:
            recorded.users += 1
            self._count_command()
        return untaken

    def _count_command(self) -> None:
        self.slots.take("commands")
        self.activity.begin()

    def _uncount_command(self) -> None:
        self.slots.give("commands")
        self.activity.end()

    async def leave(self) -> None:
        """This process ends; the sandbox and its commands go on."""
        for run in list(self.runs.values()):
            run.leave()
        if self._agent is not None:
            await self._agent.aclose()

    def restore(self, facts: dict[str, Any], *, settled: set[int]) -> None:
        """State as an earlier process saved it; not attached yet."""
        self._settled = settled
        self.generation = int(facts.get("generation", 0))
        self.hostname = str(facts.get("hostname", ""))
        ended = facts.get("ended")
        self.ended = (CommandStatus(ended[0]), str(ended[1])) if ended else None
        self.gate.suspension = Suspension.from_facts(facts.get("suspension"))
        self.gate.stood_s = float(facts.get("stood_s", 0.0))

    def _save(self) -> None:
        suspension = self.gate.suspension
        self.store.save_facts(
            {
                "generation": self.generation,
                "hostname": self.hostname,
                "ended": [self.ended[0].value, self.ended[1]] if self.ended else None,
                "suspension": None if suspension is None else suspension.to_facts(),
                "stood_s": self.gate.stood_s,
            }
        )

    # use

    def gone(self) -> CpuosError:
        status, reason = self.ended or (CommandStatus.SANDBOX_LOST, "")
        if status is CommandStatus.KILLED:
            return SandboxGone(f"cannot use sandbox {self.id}: it has ended", reason, code="sandbox_stopped")
        return SandboxGone(f"cannot use sandbox {self.id}: it is lost", reason, code="sandbox_lost")

    def explain(self, error: CpuosError) -> CpuosError:
        """A call that was cut says what became of the sandbox."""
        return self.gone() if self.ended is not None and isinstance(error, AgentFailure) else self.gate.explain(error)

    def check_generation(self, ticket: Ticket) -> None:
        if ticket.generation != self.generation:
            raise Conflict(
                f"cannot use the ticket for generation {ticket.generation}",
                f"the gateway knows generation {self.generation} of the sandbox",
                code="stale_generation" if ticket.generation < self.generation else "wrong_state",
                hint="get a new ticket: POST /v1/sandboxes/ID/access",
            )

    @property
    def idle_since(self) -> float | None:
        """Unix seconds; None while something is open, or cannot be known."""
        return self.activity.idle_since if self.gate.open else None

    async def agent(self) -> AgentClient:
        """The living agent; waits for one that is suspended, and a little for a gateway that has just started."""
        if not self.gate.open and self.ended is None:
            await self.gate.wait()
        if self._agent is None:
            raise self.gone()
        return self._agent

    async def awake(self) -> None:
        """A call needs the sandbox to run: wait for the resume of one that is suspended."""
        self.gate.check_halted()
        if self.gate.paused:
            await self.gate.wait()

    # commands

    async def start(
        self, request: CommandStart, ticket: Ticket, *, key: str | None, body: bytes
    ) -> tuple[RecordedCommand, bool]:
        """Start a command, or give the one that this key started; True when it is new."""
        digest = hashlib.sha256(body).hexdigest() if key is not None else ""
        if key is not None and (known := self.store.by_key(key)) is not None:
            if known[1] != digest:
                raise Conflict(
                    "cannot start the command: its idempotency key was used with another body",
                    code="idempotency_mismatch",
                )
            if (started := self.runs.get(known[0].id)) is not None:
                await started.wait_started()
            return known[0], False
        told = start_body(request)
        agent = await self.agent()
        self._starting += 1
        try:
            with self.activity.hold(brief=True):
                return await self._start(request, ticket, agent, told, key=key, digest=digest)
        finally:
            self._starting -= 1

    async def _start(
        self, request: CommandStart, ticket: Ticket, agent: AgentClient, told: bytes, *, key: str | None, digest: str
    ) -> tuple[RecordedCommand, bool]:
        self._count_command()
        try:
            recorded = self._record(request, ticket, key=key, digest=digest)
        except BaseException:
            self._uncount_command()
            raise
        run = self._run(recorded, agent)
        try:
            await run.start(told)
        except FileProblem as error:
            code = MISSING_PROGRAM.get(str(error.details.get("agent_code")))
            if code is None:
                self._not_started(run, error, result="error")
                raise
            run.finish_missing(code, error.why)
        except OSError as error:
            refused = Unavailable(
                "cannot record the command, so it was ended at once", str(error), code="gateway_unavailable"
            )
            self._not_started(run, refused, result="error")
            agent.kill_command_later(recorded.id)
            raise refused from error
        except LimitReached as error:
            named = await name_limit(error, self._limits_of(agent), sandbox=self.id, generation=self.generation)
            self._not_started(run, named, result="error")
            raise named from error
        except BaseException as error:
            if recorded.ended:
                return recorded, True
            known_not = isinstance(error, CpuosError) and not isinstance(error, AgentFailure | Unavailable)
            self._not_started(run, error, result="error" if known_not else "unknown")
            if not known_not:
                agent.kill_command_later(recorded.id)
            raise
        return recorded, True

    def _record(self, request: CommandStart, ticket: Ticket, *, key: str | None, digest: str) -> RecordedCommand:
        """The intent, in the journal and as a record. What cannot be written does not happen."""
        command_id = new_command_id()
        detail = {"argv": shown_argv(request), "cwd": request.cwd, "user": request.user, "timeout_s": request.timeout_s}
        detail |= {"pty": request.pty is not None, "env": sorted(request.env)[:100]}
        intent = self._journal.intent(ticket, "command.start", target=command_id, detail=detail)
        command = command_begun(request, command_id, sandbox=self.id, generation=self.generation)
        record = CommandRecord(
            command=command,
            ticket=ticket,
            intent=intent,
            key=key,
            body_digest=digest,
            timeout_s=request.timeout_s,
            stdin_open=request.stdin == "open" or request.pty is not None,
        )
        return self.store.add(record)

    def _run(self, recorded: RecordedCommand, agent: AgentClient) -> CommandRun:
        run = CommandRun(
            recorded,
            agent=agent,
            store=self.store,
            journal=self._journal,
            refusals=self._refusals,
            limits=self._limits_of(agent),
            on_told=self._uncount_command,
            on_saved=self._on_saved,
            journaled=recorded.record.intent in self._settled,
            stood_s=lambda: self.gate.stood_s,
        )
        self.runs[recorded.id] = run
        return run

    def _limits_of(self, agent: AgentClient) -> LimitReader | None:
        return None if self._limit_reader is None else GuestLimitReader(self._limit_reader, agent)

    def _on_saved(self, run: CommandRun) -> None:
        if self.runs.pop(run.id, None) is not None:
            self.store.end(run.recorded)
            self.store.make_room()

    def _not_started(self, run: CommandRun, error: BaseException, *, result: str) -> None:
        record = run.recorded.record
        detail = {"code": error.code, "error": str(error)} if isinstance(error, CpuosError) else {"error": repr(error)}
        run.abandon(error)
        if self.runs.pop(run.id, None) is not None:
            self._uncount_command()
            self.store.discard(run.recorded)
        with suppress(CpuosError):
            self._journal.outcome(
                record.intent, record.ticket, "command.start", target=run.id, result=result, detail=detail
            )

    async def find_run(self, command_id: str) -> CommandRun | None:
        """The running command, or None when it has ended; unknown ids raise. One that an earlier process started is
        waited for until it is taken up."""
        if not self.store.get(command_id).ended and command_id not in self.runs:
            await self.agent()
        return self.runs.get(command_id)

    def oom(self, pids: set[int]) -> list[str]:
        """Mark the running commands that any of these processes belongs to; their ids.

        Where none is a command's first process it was a child of one: all are marked. A mark counts only for a command
        that ends by SIGKILL, or with a shell's word for it, in the next seconds.
        """
        own = [run for run in self.runs.values() if run.recorded.record.pid in pids]
        marked = own or list(self.runs.values())
        for run in marked:
            run.ending.memory_ran_out(own=bool(own))
        if not marked:  # a process that its command had left behind
            with suppress(CpuosError):
                detail = {"limit": SandboxLimit.MEMORY.value, "seen_by": LimitSource.HOST.value}
                self._journal.note(self.id, "limit.reached", target=self.id, detail=detail)
        return [run.id for run in marked]

    def look(self) -> None:
        if self.gate.paused:
            return
        for run in list(self.runs.values()):
            run.look()
