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
from datetime import UTC, datetime
from typing import Any

import structlog

from cpuos.errors import AgentFailure, CpuosError, NotFound
from cpuos.gateway.agent.answers import Ended, Started, StdinTaken, read_answer
from cpuos.gateway.agent.client import AgentClient
from cpuos.gateway.agent.connection import AgentConnection, agent_unresponsive
from cpuos.gateway.agent.http import agent_invalid
from cpuos.gateway.journal import Journal
from cpuos.gateway.records import RecordedCommand, StreamName
from cpuos.gateway.stdin import StdinPipe, acknowledgement
from cpuos.gateway.store import CommandStore
from cpuos.types.command import CommandStart, CommandStatus
from cpuos.types.frames import FrameKind, encode_frame

__all__ = ["CommandRun"]

ACK_EVERY_BYTES = 256 << 10
BUDGET_LOOK_BYTES = 4 << 20
MAX_VIOLATIONS = 5
MAX_SILENCES = 5
MAX_FRUITLESS = 10
"""Streams in a row that the agent accepts and cuts before anything new."""
SILENCE_LIMIT_S = 20.0
"""The agent sends KEEPALIVE each 5 s: a connection this silent is dead."""
TIMEOUT_GRACE_S = 5.0
"""The agent keeps a command's time limit; so much later the gateway steps in."""
KILL_ANSWER_S = 10.0
KILL_END_S = 3.0
OOM_WAIT_S = 0.1
"""An unexplained SIGKILL is told only after this: the word from outside that memory ran out comes beside it."""
OOM_NEAR_S = 5.0
HOLD_LOOK_S = 0.05
SAVE_SOON_S = 0.001
"""After those who wait for the end were woken."""
SAVE_RETRY_S = 1.0
SIGKILL = 9
RETRY_S = (0.02, 0.1, 0.3, 1.0, 2.0)

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
        on_end: Callable[[CommandRun], None],
        journaled: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorded = recorded
        self._agent = agent
        self._store = store
        self._journal = journal
        self._on_end = on_end
        self._journaled = journaled
        """The outcome is in the journal already: an earlier process died before it saved the record."""
        self._clock = clock
        self._connection: AgentConnection | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._start_error: BaseException | None = None
        self._end: Ended | None = None
        self._finished = False
        self._saved = False
        self._detached = False
        self._unacknowledged = 0
        self._since_budget = 0
        self._failures = 0
        self._violations = 0
        self._silences = 0
        self._fruitless = 0
        self._stream_began = False
        self._heard_at = clock()
        self._began_at = clock()
        self._overdue_kill_at: float | None = None
        self._oom_at: float | None = None
        self._stdin_lock = asyncio.Lock()
        self.stdin = StdinPipe(write=self._write, notify=recorded.notify)

    @property
    def id(self) -> str:
        return self.recorded.id

    # beginning

    async def start(self, request: CommandStart) -> None:
        """Have the agent start it; returns when the program runs. A refusal raises and nothing runs."""
        body = _start_body(request)
        target = f"/v1/commands?id={self.id}"
        what = f"cannot start {self.recorded.record.command.argv[0]!r}"
        for attempt in range(3):
            try:
                # The intent is in the journal; the record is written while the agent works.
                meanwhile = self.recorded.save if attempt == 0 else None
                await self._agent.stream("POST", target, sink=self, what=what, body=body, meanwhile=meanwhile)
                async with asyncio.timeout(30):
                    await asyncio.shield(self._started)
                return
            except TimeoutError:
                raise AgentFailure(what, "the agent began no stream within 30 s", code="agent_unresponsive") from None
            except AgentFailure as error:
                # The id makes a repeat safe: the agent attaches to what it has started already.
                if attempt == 2 or error.code != "agent_unresponsive" or self._detached:
                    raise
                self._started = asyncio.get_running_loop().create_future()
                await asyncio.sleep(RETRY_S[attempt])

    def recover(self) -> None:
        """Attach to a command that an earlier gateway process started."""
        self._settle_started(None)
        self._spawn(self._attach())

    async def wait_started(self) -> None:
        """For a second caller with the same idempotency key: the first one's success or error."""
        while not self._finished and not self.recorded.ended:
            if self._started.done() and self._started.exception() is None:
                return
            await self.recorded.change(1.0)
        if self._start_error is not None:
            raise self._start_error

    def abandon(self, error: BaseException) -> None:
        """The start failed: forget the run, without an end."""
        self._finished = True
        self._start_error = error
        self._settle_started(None)
        self._drop_connection()
        self.recorded.notify()

    def leave(self) -> None:
        """This process ends: drop the connection, the program runs on and the next process attaches."""
        self._detached = True
        for task in self._tasks:
            task.cancel()
        self._drop_connection()
        if self.recorded.ended:
            self._save_end()

    # what the connection brings (FrameSink)

    def opened(self, connection: AgentConnection) -> None:
        self._connection = connection
        self._stream_began = False
        self._heard_at = self._clock()

    def frame(self, kind: FrameKind, offset: int, payload: memoryview | bytes) -> None:
        if self._finished or self._end is not None:
            return
        self._heard_at = self._clock()
        if kind is FrameKind.STARTED:
            self._on_started(read_answer(Started, payload))
            return
        if not self._stream_began and kind is not FrameKind.ERROR:
            raise agent_invalid(f"frame {kind.name} comes before STARTED")
        self._silences = 0
        if kind is FrameKind.KEEPALIVE:
            self._fruitless = 0
            if self._connection is not None:
                asyncio.get_running_loop().call_soon(self._connection.shrink)
        elif kind is FrameKind.STDOUT:
            self._output("stdout", offset, payload)
        elif kind is FrameKind.STDERR:
            self._output("stderr", offset, payload)
        elif kind is FrameKind.ENDED:
            self._on_ended(read_answer(Ended, payload))
        elif kind is FrameKind.ACK:
            self.stdin.acknowledge(read_answer(StdinTaken, payload).stdin)
        elif kind is FrameKind.ERROR:
            raise AgentFailure("cannot follow the command", "the agent ended its stream", code="agent_unresponsive")
        else:
            raise agent_invalid(f"frame {kind.name} does not belong to a command")

    def cut(self, error: CpuosError | None) -> None:
        self._connection = None
        if self._finished or self._end is not None or self._detached:
            return
        if error is not None and error.code == "agent_invalid":
            self._violations += 1
        self._fruitless += 1
        if not self._started.done():
            self._settle_started(error or AgentFailure("cannot start", "cut", code="agent_unresponsive"))
        elif self._violations >= MAX_VIOLATIONS:
            self._give_up(f"the agent broke its contract: {error.why}")
        elif self._fruitless >= MAX_FRUITLESS:
            self._give_up(f"the agent cut its stream {self._fruitless} times in a row")
        else:
            self._spawn(self._attach())

    def _on_started(self, started: Started) -> None:
        self._stream_began = True
        self._failures = min(self._failures, 1)
        if self.recorded.record.pid is None:
            self.recorded.record = replace(self.recorded.record, pid=started.pid)
        self.stdin.connected(started.stdin)
        self._settle_started(None)
        self.recorded.notify()

    def _output(self, name: StreamName, offset: int, payload: memoryview | bytes) -> None:
        stream = self.recorded.streams[name]
        if offset > stream.total:
            raise agent_invalid(f"its {name} jumps from {stream.total} to {offset}")
        payload = payload[stream.total - offset :]
        if not payload:
            return
        try:
            stream.write(payload)
        except OSError as error:
            # Nothing is lost: the agent holds it, and the program's pipe blocks until there is room.
            log.warning(
                "spool.blocked", sandbox=self.recorded.record.command.sandbox, command=self.id, error=str(error)
            )
            raise AgentFailure("cannot record output", str(error), code="agent_unresponsive") from error
        self._failures = self._fruitless = 0
        self._unacknowledged += len(payload)
        self._since_budget += len(payload)
        self.recorded.notify()
        if self._since_budget >= BUDGET_LOOK_BYTES:
            self._since_budget = 0
            if not self._store.make_room():
                for own in self.recorded.streams.values():
                    own.freeze()
        if self._unacknowledged >= ACK_EVERY_BYTES:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Let the agent send on, unless a client that reads would lose what it has not read yet."""
        if self._finished or self._unacknowledged == 0:
            return
        if self.recorded.holds_back():
            asyncio.get_running_loop().call_later(HOLD_LOOK_S, self._acknowledge)
            return
        self._unacknowledged = 0
        streams = self.recorded.streams
        self._write(acknowledgement(streams["stdout"].total, streams["stderr"].total))

    def _on_ended(self, ended: Ended) -> None:
        self._end = ended
        for name in ("stdout", "stderr"):
            told, held = getattr(ended, f"{name}_bytes"), self.recorded.streams[name].total
            if told != held:
                log.warning("output.count", command=self.id, stream=name, told=told, held=held)
        if self._killed_by_nobody(ended) and self._oom_at is None:
            asyncio.get_running_loop().call_later(OOM_WAIT_S, self._finish_ended)
        else:
            self._finish_ended()

    def _finish_ended(self) -> None:
        ended = self._end
        status = CommandStatus(ended.status)
        memory_ended_it = self._oom_at is not None and self._clock() - self._oom_at <= OOM_NEAR_S
        if memory_ended_it and (ended.signal == SIGKILL or ended.exit_code == 128 + SIGKILL):
            self._finish(
                CommandStatus.OOM_KILLED,
                signal=SIGKILL,
                reason="the sandbox ran out of memory",
                duration_s=self._duration(ended.duration_s),
                output_path=self._output_path(ended),
            )
            return
        self._finish(
            status,
            exit_code=ended.exit_code,
            signal=ended.signal,
            limit=ended.limit,
            reason=ended.reason,
            duration_s=self._duration(ended.duration_s),
            output_path=self._output_path(ended),
        )

    def _killed_by_nobody(self, ended: Ended) -> bool:
        return ended.status == "signalled" and ended.signal == SIGKILL

    def _duration(self, told: float) -> float:
        """The agent's figure, unless it is longer than the command can have run."""
        return round(min(told, self.age_s() + 0.1), 6)

    def age_s(self) -> float:
        """Seconds since the start, also over a restart of the gateway."""
        return max(0.0, (datetime.now(UTC) - self.recorded.record.command.started_at).total_seconds())

    def _output_path(self, ended: Ended) -> str | None:
        expected = f"/var/log/cpuos/commands/{self.id}"
        return expected if (ended.output_path or "").rstrip("/") == expected else None

    # ends

    def finish_with_sandbox(self, status: CommandStatus, reason: str) -> None:
        """The sandbox ended, and the command with it; what came of its output is kept."""
        self._detached = True
        self._settle_started(AgentFailure("cannot start", reason, code="agent_unresponsive"))
        if self._end is not None:
            self._finish_ended()
        self._finish(status, reason=reason, duration_s=round(self.age_s(), 6))

    def finish_unstarted(self) -> None:
        """An earlier gateway died between its record and the start: the agent never got the command."""
        self._store.drop_key(self.recorded)
        self._settle_started(None)
        self._finish(
            CommandStatus.UNKNOWN, reason="the gateway restarted before the command was started; it did not run"
        )

    def finish_missing(self, exit_code: int, why: str) -> None:
        """The agent found no such program: told as a shell tells it."""
        self._settle_started(None)
        self._detached = True
        self._finish(CommandStatus.EXITED, exit_code=exit_code, reason=why or "no such program")

    def oom(self) -> None:
        """Told from outside: memory ran out, and a process of this command was chosen to end."""
        self._oom_at = self._clock()

    def _give_up(self, reason: str) -> None:
        """Nobody can know how the command goes on or ends."""
        self._finish(CommandStatus.UNKNOWN, reason=reason)
        self._spawn(self._kill_quietly(reason))

    def _finish(self, status: CommandStatus, **fields: Any) -> None:
        """The one way to the end; the first caller wins."""
        if self._finished:
            return
        self._finished = True
        self._record_end(status, fields)

    def _record_end(self, status: CommandStatus, fields: dict[str, Any]) -> None:
        """The outcome goes to the journal, then it is told, then the record is saved, then the agent may forget.

        Whatever of it a crash prevents, the next process does: the agent keeps the end until the record is saved.
        """
        before = self.recorded.record
        fields.setdefault("duration_s", round(self.age_s(), 6))
        self.recorded.update(status=status, ended_at=datetime.now(UTC), **fields)
        try:
            self._write_outcome()
        except CpuosError as error:
            self.recorded.record = before
            log.error("outcome.not_recorded", command=self.id, error=str(error))
            asyncio.get_running_loop().call_later(SAVE_RETRY_S, self._record_end, status, fields)
            return
        self._drop_connection()
        self.recorded.notify()
        if self._detached:
            self._save_end()
        else:
            asyncio.get_running_loop().call_later(SAVE_SOON_S, self._save_end)

    def _save_end(self) -> None:
        if self._saved:
            return
        try:
            self.recorded.save()
        except OSError as error:
            log.error("record.not_saved", command=self.id, error=str(error))
            asyncio.get_running_loop().call_later(SAVE_RETRY_S, self._save_end)
            return
        self._saved = True
        self._on_end(self)
        if not self._detached:
            self._agent.forget_command(self.id)

    def _write_outcome(self) -> None:
        if self._journaled:
            return
        record, command = self.recorded.record, self.recorded.record.command
        unknown = command.status is CommandStatus.UNKNOWN
        self._journal.outcome(
            record.intent,
            record.ticket,
            "command.start",
            target=self.id,
            result="unknown" if unknown else "ok",
            detail={
                "status": command.status.value,
                "exit_code": command.exit_code,
                "signal": command.signal,
                "reason": command.reason,
                "duration_s": command.duration_s,
                "stdout_bytes": command.stdout_bytes,
                "stderr_bytes": command.stderr_bytes,
            },
        )
        self._journaled = True

    # what clients ask

    async def write_stdin(self, data: bytes, *, offset: int) -> int:
        """Pass bytes on as the program takes them; the offset that follows. Bytes for an ended command are dropped."""
        async with self._stdin_lock:
            if self.recorded.ended:
                return offset + len(data)
            data = self.stdin.new_bytes(data, offset)
            position = 0
            while position < len(data) and not self.recorded.ended:
                taken = self.stdin.accept(data[position:])
                position += taken
                if not taken:
                    await self.recorded.change(5.0)
            return self.stdin.accepted

    async def flush_stdin(self) -> None:
        """Wait until the program has taken all, or is gone."""
        target = self.stdin.accepted
        while self.stdin.taken < target and not self.recorded.ended:
            await self.recorded.change(5.0)

    def close_stdin(self) -> None:
        self.stdin.close()

    def resize(self, cols: int, rows: int) -> None:
        self._write(encode_frame(FrameKind.RESIZE, json.dumps({"cols": cols, "rows": rows}).encode()))

    async def kill(self, number: int, *, reason: str) -> None:
        """Send a signal; SIGKILL ends the whole tree and returns when the end is recorded."""
        if number != SIGKILL:
            payload = json.dumps({"signal": number, "reason": reason}).encode()
            if self._connection is None and not self.recorded.ended:
                raise agent_unresponsive("the command's stream is being attached again; repeat the call")
            self._write(encode_frame(FrameKind.KILL, payload))
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
        target = f"/v1/commands/{self.id}/kill"
        what = f"cannot kill command {self.id}"
        await self._agent.call("POST", target, what=what, body=body, limit_s=KILL_ANSWER_S)

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
            self._silences += 1
            self._connection.close()
            if self._silences >= MAX_SILENCES:
                self._give_up("the agent has fallen silent")
                return
        limit = self.recorded.record.timeout_s
        if limit is None or self._finished or self._end is not None or self.age_s() < limit + TIMEOUT_GRACE_S:
            return
        if self._overdue_kill_at is None:
            self._overdue_kill_at = now
            self._spawn(self._kill_quietly("its time limit passed"))
        elif now - self._overdue_kill_at > 2 * TIMEOUT_GRACE_S:
            self._finish(CommandStatus.UNKNOWN, reason="its time limit passed and the agent did not end it")

    async def _attach(self) -> None:
        """Have the stream again, from where the record ends."""
        while not self._finished and not self._detached:
            delay = RETRY_S[min(self._failures, len(RETRY_S) - 1)]
            self._failures += 1
            await asyncio.sleep(delay)
            streams = self.recorded.streams
            target = f"/v1/commands/{self.id}/attach?stdout={streams['stdout'].total}&stderr={streams['stderr'].total}"
            try:
                await self._agent.stream("POST", target, sink=self, what="cannot follow the command")
            except NotFound:
                self._finish(CommandStatus.UNKNOWN, reason="the agent does not know the command")
            except CpuosError as error:
                log.warning("attach.failed", command=self.id, error=str(error))
                if error.code == "agent_invalid":
                    self._violations += 1
                if self._violations >= MAX_VIOLATIONS:
                    self._give_up(f"the agent broke its contract: {error.why}")
            else:
                return

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

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _start_body(request: CommandStart) -> bytes:
    values = request.model_dump(exclude={"detach"})
    values = {name: value for name, value in values.items() if value is not None or name in ("timeout_s", "pty")}
    return json.dumps({**values, "attach": True}, ensure_ascii=False).encode()
