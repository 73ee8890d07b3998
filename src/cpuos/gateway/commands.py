"""One running command as the gateway sees it: pulls its output into the record always, client or none, until its end.

The agent may forget only what was written here. A cut connection is attached again at the recorded offsets; the
command ends when the agent says so within the contract, when the sandbox ends, or, where nobody can know any more,
as `unknown`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from cpuos.errors import AgentFailure, CpuosError, InvalidRequest, NotFound
from cpuos.gateway.agent.answers import Ended, Started, StdinTaken, read_answer
from cpuos.gateway.agent.client import AgentClient
from cpuos.gateway.agent.connection import AgentConnection, agent_unresponsive
from cpuos.gateway.agent.http import agent_invalid
from cpuos.gateway.ending import SIGKILL, CommandEnding
from cpuos.gateway.journal import Journal
from cpuos.gateway.reached import LimitReader, ReachedLimits
from cpuos.gateway.records import RecordedCommand, StreamName
from cpuos.gateway.refusals import Refusals
from cpuos.gateway.stdin import StdinPipe
from cpuos.gateway.store import CommandStore
from cpuos.gateway.trust import StreamTrust
from cpuos.types.command import CommandStart, CommandStatus
from cpuos.types.frames import FrameKind, encode_frame
from cpuos.types.limits import ReachedLimit

__all__ = ["CommandRun", "start_body"]

ACK_EVERY_BYTES = 512 << 10
"""Half of what the agent holds: it goes on while this half is on its way."""
BUDGET_LOOK_BYTES = 4 << 20
HOLD_LOOK_S = 0.05
SILENCE_LIMIT_S = 20.0
"""The agent sends KEEPALIVE each 5 s: a connection this silent is dead."""
TIMEOUT_GRACE_S = 5.0
"""The agent keeps a command's time limit; so much later the gateway steps in."""
START_ATTEMPTS = 3
MAX_START_BYTES = 2 << 20
KILL_ANSWER_S = 10.0
KILL_END_S = 3.0
STDIN_LOOK_S = 5.0

log = structlog.get_logger("gateway.commands")


class CommandRun:
    """A frame sink for the agent's stream of one command. Not started until `start` or `recover`."""

    def __init__(
        self,
        recorded: RecordedCommand,
        *,
        agent: AgentClient,
        store: CommandStore,
        journal: Journal,
        refusals: Refusals | None,
        limits: LimitReader | None,
        on_told: Callable[[], None],
        on_saved: Callable[[CommandRun], None],
        journaled: bool = False,
        stood_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorded = recorded
        self._agent = agent
        self._store = store
        self._told = on_told
        self._saved = on_saved
        self._clock = clock
        self._stood_s = stood_s
        self._stood_before = stood_s()
        self._held = False
        """The sandbox stands still: the agent is not to be asked."""
        self._attaching: asyncio.Task[None] | None = None
        self._size: tuple[int, int] | None = None
        """Of its terminal, as long as the agent may not have heard of it."""
        self._connection: AgentConnection | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start_error: BaseException | None = None
        self._abandoned = False
        self._left = False
        """The sandbox or this process is at its end: no stream is wanted any more."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._trust = StreamTrust()
        self._stream_began = False
        self._heard_at = clock()
        self._unacknowledged = 0
        self._since_budget = 0
        self._overdue_kill_at: float | None = None
        self._stdin_lock = asyncio.Lock()
        self.stdin = StdinPipe(write=self._write, notify=recorded.notify)
        self._reached = ReachedLimits(recorded, limits)
        self.ending = CommandEnding(
            recorded,
            journal=journal,
            refusals=refusals,
            reached=self._reached,
            spawn=self._spawn,
            on_told=self._on_told,
            on_saved=self._on_saved,
            journaled=journaled,
            clock=clock,
        )

    @property
    def id(self) -> str:
        return self.recorded.id

    # beginning

    async def start(self, body: bytes) -> None:
        """Have the agent start it; returns when the program runs. A refusal raises and nothing runs."""
        target = f"/v1/commands?id={self.id}"
        what = f"cannot start {self.recorded.record.command.argv[0]!r}"
        for attempt in range(START_ATTEMPTS):
            try:
                # The intent is in the journal; the record is written while the agent works.
                meanwhile = self.recorded.save if attempt == 0 else None
                await self._agent.stream("POST", target, sink=self, what=what, body=body, meanwhile=meanwhile)
                if not self._started.done():  # else it came along with the answer's head
                    async with asyncio.timeout(self._agent.times.answer_s):
                        await asyncio.shield(self._started)
                self._started.result()
                return
            except TimeoutError:
                raise AgentFailure(what, "the agent began no stream", code="agent_unresponsive") from None
            except AgentFailure as error:
                # The id makes a repeat safe: the agent attaches to what it has started already.
                if attempt + 1 == START_ATTEMPTS or error.code != "agent_unresponsive" or self._left:
                    raise
                self._started = asyncio.get_running_loop().create_future()
                await asyncio.sleep(self._trust.next_delay_s())

    def recover(self) -> None:
        """Attach to a command that an earlier gateway process started."""
        self._stood_before = 0.0  # all, as nobody knows how much of it was before its start
        self._settle_started(None)
        self._attach_soon()

    async def wait_started(self) -> None:
        """For a second caller with the same idempotency key: the first one's success or error."""
        while not self._abandoned and not self.recorded.ended:
            if self._started.done() and self._started.exception() is None:
                return
            await self.recorded.change(1.0)
        if self._start_error is not None:
            raise self._start_error

    def abandon(self, error: BaseException) -> None:
        """The start failed: forget the run, without an end."""
        self._abandoned = True
        self._start_error = error
        self._settle_started(None)
        self._drop_connection()
        self.recorded.notify()

    def hold(self) -> None:
        """The sandbox stands still, or its agent is lost: without a stream until `go_on`."""
        self._held = True
        if self._attaching is not None:
            self._attaching.cancel()
        self._drop_connection()

    def go_on(self, agent: AgentClient, *, known: bool) -> None:
        """Follow the command by this agent from now on, which may not know it any more."""
        self._agent = agent
        self._held = False
        self._overdue_kill_at = None
        if self._done or self._left:
            return
        if known:
            self._attach_soon()
        else:
            self.ending.decide(CommandStatus.UNKNOWN, reason="the agent does not know the command")

    def leave(self) -> None:
        """This process ends: drop the connection, the program runs on and the next process attaches."""
        self._left = True
        for task in self._tasks:
            task.cancel()
        self._drop_connection()
        self.ending.save()

    # what the connection brings (FrameSink)

    def opened(self, connection: AgentConnection) -> None:
        self._connection = connection
        self._stream_began = False
        self._heard_at = self._clock()

    def frame(self, kind: FrameKind, offset: int, payload: memoryview | bytes) -> None:
        if self._done:
            return
        self._heard_at = self._clock()
        if kind is FrameKind.STARTED:
            self._take_started(read_answer(Started, payload))
            return
        if not self._stream_began and kind is not FrameKind.ERROR:
            raise agent_invalid(f"frame {kind.name} comes before STARTED")
        if kind is FrameKind.STDOUT:
            self._take_output("stdout", offset, payload)
        elif kind is FrameKind.STDERR:
            self._take_output("stderr", offset, payload)
        elif kind is FrameKind.ENDED:
            self.ending.take_word(read_answer(Ended, payload))
        elif kind is FrameKind.ACK:
            self.stdin.acknowledge(read_answer(StdinTaken, payload).stdin)
        elif kind is FrameKind.KEEPALIVE:
            self._trust.took_keepalive()
            asyncio.get_running_loop().call_soon(self._shrink)
        elif kind is FrameKind.ERROR:
            raise AgentFailure("cannot follow the command", "the agent ended its stream", code="agent_unresponsive")
        else:
            raise agent_invalid(f"frame {kind.name} does not belong to a command")

    def cut(self, error: CpuosError | None) -> None:
        self._connection = None
        if self._done or self._left or self._held:
            return
        if not self._started.done():
            self._settle_started(error or agent_unresponsive("it cut the stream before it began"))
            return
        self._trust.was_cut(error)
        if not self._gave_up():
            self._attach_soon()

    @property
    def _done(self) -> bool:
        """Nothing more of the agent's is wanted."""
        return self._abandoned or self.ending.heard

    def _take_started(self, started: Started) -> None:
        self._stream_began = True
        self._trust.took_sign()
        if self.recorded.record.pid is None:
            self.recorded.record = replace(self.recorded.record, pid=started.pid)
        self.stdin.connected(started.stdin)
        if self._size is not None:
            self.resize(*self._size)
        self._settle_started(None)
        self.recorded.notify()

    def _take_output(self, name: StreamName, offset: int, payload: memoryview | bytes) -> None:
        stream = self.recorded.streams[name]
        if offset > stream.total:
            raise agent_invalid(f"its {name} jumps from {stream.total} to {offset}")
        payload = payload[stream.total - offset :]
        if not payload:
            return
        try:
            stream.write(payload)
        except OSError as error:
            self._trust.took_keepalive()
            # Nothing is lost: the agent holds it, and the program's pipe blocks until there is room.
            log.warning("spool.blocked", command=self.id, error=str(error))
            raise AgentFailure("cannot record output", str(error), code="agent_unresponsive") from error
        self._trust.took_output()
        if name == "stderr" or self.recorded.record.command.pty:
            self._reached.took_output(payload)
        self._unacknowledged += len(payload)
        self._since_budget += len(payload)
        self.recorded.notify()
        if self._since_budget >= BUDGET_LOOK_BYTES:
            self._since_budget = 0
            self._keep_budget()
        if self._unacknowledged >= ACK_EVERY_BYTES:
            self._acknowledge()

    def _keep_budget(self) -> None:
        if not self._store.make_room():
            for stream in self.recorded.streams.values():
                stream.freeze()

    def _acknowledge(self) -> None:
        """Let the agent send on, unless a client that reads would lose what it has not read yet."""
        if self._done or self._unacknowledged == 0:
            return
        if self.recorded.holds_back():
            asyncio.get_running_loop().call_later(HOLD_LOOK_S, self._acknowledge)
            return
        self._unacknowledged = 0
        held = {name: stream.total for name, stream in self.recorded.streams.items()}
        self._write(encode_frame(FrameKind.ACK, json.dumps(held).encode(), offset=held["stdout"]))

    def _shrink(self) -> None:
        if self._connection is not None:
            self._connection.shrink()

    # ends from outside

    def finish_with_sandbox(self, status: CommandStatus, reason: str, *, limit: ReachedLimit | None = None) -> None:
        """The sandbox ended, and the command with it; what came of its output is kept."""
        self._left = True
        self._settle_started(agent_unresponsive(reason))
        self.ending.settle()  # where the agent had told the end already
        self.ending.decide(status, reason=reason, limit_reached=limit)
        self.ending.save()

    def finish_unstarted(self) -> None:
        """An earlier gateway died between its record and the start: the agent never got the command."""
        self._store.drop_key(self.recorded)
        self._settle_started(None)
        why = "the gateway restarted before the command was started; it did not run"
        self.ending.decide(CommandStatus.UNKNOWN, reason=why)

    def finish_missing(self, exit_code: int, why: str) -> None:
        """The agent found no such program: told as a shell tells it."""
        self._left = True
        self._settle_started(None)
        self.ending.decide(CommandStatus.EXITED, exit_code=exit_code, reason=why or "no such program")

    def _gave_up(self) -> bool:
        """End it as unknown where the agent cannot be trusted any more."""
        why = self._trust.lost
        if why is None:
            return False
        self.ending.decide(CommandStatus.UNKNOWN, reason=why)
        self._spawn(self._kill_quietly(why))
        return True

    def _on_told(self) -> None:
        self._drop_connection()
        self._told()

    def _on_saved(self) -> None:
        self._saved(self)
        if not self._left:
            self._agent.forget_command(self.id)

    # what clients ask

    async def write_stdin(self, data: bytes, *, offset: int | None) -> None:
        """Pass bytes on as the program takes them; None: behind those before. For an ended command they are dropped."""
        async with self._stdin_lock:
            while not self.stdin.known and not self.recorded.ended:
                await self.recorded.change(STDIN_LOOK_S)
            if self.recorded.ended:
                return
            if offset is not None:
                data = self.stdin.new_bytes(data, offset)
            position = 0
            while position < len(data) and not self.recorded.ended:
                taken = self.stdin.accept(data[position:])
                position += taken
                if not taken:
                    await self.recorded.change(STDIN_LOOK_S)

    async def flush_stdin(self) -> None:
        """Wait until the program has taken all, or is gone."""
        target = self.stdin.accepted
        while self.stdin.taken < target and not self.recorded.ended:
            await self.recorded.change(STDIN_LOOK_S)

    def close_stdin(self) -> None:
        self.stdin.close()

    def resize(self, cols: int, rows: int) -> None:
        self._size = None if self._connection is not None else (cols, rows)
        self._write(encode_frame(FrameKind.RESIZE, json.dumps({"cols": cols, "rows": rows}).encode()))

    async def kill(self, number: int, *, reason: str) -> None:
        """Send a signal; SIGKILL ends the whole tree and returns when the end is recorded."""
        if number != SIGKILL:
            if self._connection is None and not self.recorded.ended:
                raise agent_unresponsive("the command's stream is being attached again; repeat the call")
            self._write(encode_frame(FrameKind.KILL, json.dumps({"signal": number, "reason": reason}).encode()))
            return
        try:
            await self._ask_kill(reason)
        except NotFound:
            pass  # it ended meanwhile
        deadline = self._clock() + KILL_END_S
        while not self.recorded.ended and (left := deadline - self._clock()) > 0:
            await self.recorded.change(left)

    async def _ask_kill(self, reason: str) -> None:
        body = json.dumps({"signal": SIGKILL, "reason": reason}).encode()
        what = f"cannot kill command {self.id}"
        await self._agent.call("POST", f"/v1/commands/{self.id}/kill", what=what, body=body, limit_s=KILL_ANSWER_S)

    async def _kill_quietly(self, reason: str) -> None:
        try:
            await self._ask_kill(reason)
        except CpuosError as error:
            log.warning("kill.failed", command=self.id, error=str(error))

    # watching

    def look(self) -> None:
        """Called every few seconds: drop a dead connection, and step in where the agent lets a time limit pass."""
        now = self._clock()
        if self._connection is not None and now - self._heard_at > SILENCE_LIMIT_S:
            self._heard_at = now
            self._trust.was_silent()
            self._connection.close()
            if self._gave_up():
                return
        limit = self.recorded.record.timeout_s
        stood_s = self._stood_s() - self._stood_before
        if limit is None or self._done or self.ending.age_s() - stood_s < limit + TIMEOUT_GRACE_S:
            return
        if self._overdue_kill_at is None:
            self._overdue_kill_at = now
            self._spawn(self._kill_quietly("its time limit passed"))
        elif now - self._overdue_kill_at > 2 * TIMEOUT_GRACE_S:
            why = "its time limit passed and the agent did not end it"
            self.ending.decide(CommandStatus.UNKNOWN, reason=why)

    def _attach_soon(self) -> None:
        if self._attaching is None or self._attaching.done() or self._attaching.cancelling():
            self._attaching = self._spawn(self._attach())

    async def _attach(self) -> None:
        """Have the stream again, from where the record ends."""
        while not self._done and not self._left:
            await asyncio.sleep(self._trust.next_delay_s())
            totals = [stream.total for stream in self.recorded.streams.values()]
            target = f"/v1/commands/{self.id}/attach?stdout={totals[0]}&stderr={totals[1]}"
            try:
                await self._agent.stream("POST", target, sink=self, what="cannot follow the command")
                return
            except NotFound:
                self.ending.decide(CommandStatus.UNKNOWN, reason="the agent does not know the command")
            except CpuosError as error:
                log.warning("attach.failed", command=self.id, error=str(error))
                self._trust.was_refused(error)
                self._gave_up()

    # inner

    def _write(self, frame: bytes) -> None:
        if self._connection is not None:
            self._connection.write(frame)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _settle_started(self, error: CpuosError | None) -> None:
        if self._started.done():
            return
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)
            self._started.exception()  # seen, also where nobody waits any more

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def start_body(request: CommandStart) -> bytes:
    """The agent's form of the request."""
    body = request.model_dump_json(exclude={"detach"}, exclude_none=True).encode()[:-1] + b',"attach":true}'
    if len(body) > MAX_START_BYTES:
        raise InvalidRequest(
            "cannot start the command: argv and env are too long",
            f"they are {len(body)} bytes as JSON, at most {MAX_START_BYTES} can be passed",
            hint="pass data by a file or stdin",
        )
    return body
