"""Job: a command that was started; the parts that follow its stream, feed its input and end it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from cpuos.client._async.connection import AsyncGateway
from cpuos.client._backend_async import call_blocking, call_each, sleep
from cpuos.client._http import PATIENT, Answer, Retry, TransportFailure
from cpuos.client._output import HeadTail
from cpuos.client._parse import parse_answer
from cpuos.client._sink import LineCallback, OutputSink
from cpuos.client._stdin import stdin_pieces
from cpuos.client._stream import CommandStream, Gap, Output
from cpuos.client.result import Result, make_result, raise_platform_failure
from cpuos.errors import Conflict, CpuosError, LimitReached, NotFound, OutputLost, SandboxGone
from cpuos.types.command import Command, CommandStatus
from cpuos.types.units import parse_duration_s, parse_size_bytes

__all__ = ["AsyncJob", "feed_stdin", "follow", "kill_command", "kill_quietly"]

# Shorter than the read time limit, so that a quiet answer is never taken for a cut.
LONG_POLL_S = 25.0
# The answer comes when the program has taken the piece; a program may think before it reads.
STDIN_TIMEOUT_S = 3600.0
# A burst of commands over the sandbox's limit waits for its turn; so do streams.
_QUEUED_FOR = ("commands", "streams")
_JSON = {"content-type": "application/json"}


class AsyncJob:
    """A started command, running or ended."""

    def __init__(
        self,
        gateway: AsyncGateway,
        info: Command | None,
        *,
        command_id: str | None = None,
        on_stdout: LineCallback | None = None,
        on_stderr: LineCallback | None = None,
        max_output: str | int = "1MiB",
    ) -> None:
        self._gateway = gateway
        self.id = command_id or (info.id if info else "")
        self._info = info
        self._on_stdout = on_stdout
        self._on_stderr = on_stderr
        self._max_output = max_output
        self._stdin_offset = 0

    @property
    def info(self) -> Command:
        """The record as last read; `refresh` reads it anew."""
        assert self._info is not None
        return self._info

    @property
    def status(self) -> CommandStatus:
        """`running`, or how it ended, as last read."""
        return self.info.status

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._info.status if self._info else 'not read yet'}>"

    async def refresh(self) -> Command:
        """Read the record anew."""
        self._info = parse_answer(Command, (await self._gateway.call("GET", self._path)).body)
        return self._info

    async def wait(self, timeout: str | float | None = None, *, check: bool = False) -> Result:
        """The result once it ended. After `timeout`, a result with status `running` and the output so far.

        The callbacks given to spawn are called from here, from the first line on.
        """
        if timeout is not None and not await self._ended_within(parse_duration_s(timeout, name="timeout")):
            return await self._result_so_far()
        sink = OutputSink(on_stdout=self._on_stdout, on_stderr=self._on_stderr, max_output=self._max_output)
        stream = CommandStream(command_id=self.id)
        await follow(self._gateway, stream, sink)
        self._info = stream.ended
        result = sink.result(self.info)
        raise_platform_failure(result)
        return result.check() if check else result

    async def follow(self) -> AsyncIterator[Output | Gap]:
        """Output from the first byte until the command ends: `Output(stream, data)` and `Gap(stream, to)`."""
        stream = CommandStream(command_id=self.id)
        async with aclosing(_events(self._gateway, stream)) as events:
            async for event in events:
                yield event
        self._info = stream.ended

    async def kill(self, signal: str = "KILL") -> None:
        """Signal the whole process tree; nothing happens when it has ended."""
        await kill_command(self._gateway, self.id, signal)

    async def output(self, stream: str = "stdout", *, offset: int = 0, limit: int | None = None) -> bytes:
        """Recorded bytes from `offset` on. Raises `output_lost` when some of them are not held any more."""
        answer = await self._output(stream, offset, limit)
        gap = answer.headers.get("x-output-gap")
        if gap:
            raise OutputLost(
                f"cannot read output of command {self.id}: {stream} from {offset}",
                f"bytes {gap} were dropped: the record keeps head and tail",
                code="output_lost",
                hint=f"job.output({stream!r}, offset={gap.rpartition('-')[2]})",
                details={"gap": gap},
            )
        return answer.body

    async def write_stdin(self, data: bytes | str) -> None:
        """Give the program more to read; it was started with `stdin=PIPE`."""
        for piece in stdin_pieces(data):
            await _post_stdin(self._gateway, self.id, piece, offset=self._stdin_offset)
            self._stdin_offset += len(piece)

    async def close_stdin(self) -> None:
        """The program sees end of file."""
        await _post_stdin(self._gateway, self.id, b"", offset=self._stdin_offset, end=True)

    @property
    def _path(self) -> str:
        return f"{self._gateway.root}/commands/{quote(self.id, safe='')}"

    async def _output(self, stream: str, offset: int, limit: int | None) -> Answer:
        query = {"stream": stream, "offset": offset, "limit": limit}
        return await self._gateway.call("GET", f"{self._path}/output", query=query)

    async def _ended_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            query = {"timeout_s": round(max(min(left, LONG_POLL_S), 0.0), 3)}
            answer = await self._gateway.call("GET", f"{self._path}/wait", query=query)
            self._info = parse_answer(Command, answer.body)
            if self._info.status.ended:
                return True
            if left <= LONG_POLL_S:
                return False

    async def _result_so_far(self) -> Result:
        limit = parse_size_bytes(self._max_output, name="max_output")
        kept = {}
        for stream in ("stdout", "stderr"):
            collector = HeadTail(limit)
            head = await self._output(stream, 0, max(limit - limit // 2, 1))
            collector.feed(head.body)
            total = int(head.headers.get("x-output-total", len(head.body)))
            if total > collector.offset:
                start = max(collector.offset, total - limit // 2)
                collector.skip_to(start)
                collector.feed((await self._output(stream, start, limit // 2)).body)
            kept[stream] = collector.kept()
        return make_result(self.info, stdout=kept["stdout"], stderr=kept["stderr"])


async def follow(
    gateway: AsyncGateway,
    stream: CommandStream,
    sink: OutputSink,
    *,
    body: bytes | None = None,
    key: str = "",
    on_started: Callable[[str], None] | None = None,
) -> None:
    """Bring a command's output to the sink until the command ended. With `body` it is started first."""
    events = _events(gateway, stream, body=body, key=key, tail=sink.tail, on_started=on_started)
    async with aclosing(events):
        async for event in events:
            if due := sink.take(event):
                await call_each(*due)
    for callback, lines in sink.finish():
        await call_each(callback, lines)


async def feed_stdin(
    gateway: AsyncGateway,
    command_id: str,
    pieces: Iterator[bytes],
    problems: list[CpuosError],
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Send the input and its end. A program that ended without reading all is no problem; others end the command."""
    offset = 0
    try:
        while (piece := await call_blocking(next, pieces, None)) is not None:
            if ended() or not await _post_stdin(gateway, command_id, piece, offset=offset):
                return
            offset += len(piece)
        if ended():
            return
        await _post_stdin(gateway, command_id, b"", offset=offset, end=True)
    except (Conflict, NotFound, SandboxGone):
        return
    except CpuosError as error:
        problems.append(error)
        await kill_quietly(gateway, CommandStream(command_id=command_id))


async def kill_quietly(gateway: AsyncGateway, stream: CommandStream, body: bytes | None = None, key: str = "") -> None:
    """End a command that nobody waits for. One that has told no id yet is found by its key."""
    try:
        if stream.command_id is None and body is not None:
            async for _ in _events(gateway, stream, body=body, key=key, until_started=True):
                pass
        if stream.command_id is not None and stream.ended is None:
            await kill_command(gateway, stream.command_id, "KILL")
    except CpuosError:
        # The caller has its own error to raise; the command's own time limit and the sandbox's still hold.
        return


async def _events(
    gateway: AsyncGateway,
    stream: CommandStream,
    *,
    body: bytes | None = None,
    key: str = "",
    tail: int | None = None,
    on_started: Callable[[str], None] | None = None,
    until_started: bool = False,
) -> AsyncGenerator[Output | Gap, None]:
    retry = Retry(PATIENT, repeatable=True)
    while stream.ended is None:
        before = stream.offsets
        error: CpuosError | None = None
        try:
            answer = await _open_stream(gateway, stream, body=body, key=key, tail=tail)
            try:
                async for chunk in answer.chunks():
                    events = stream.feed(chunk)
                    if on_started is not None and stream.command_id is not None:
                        on_started(stream.command_id)
                        on_started = None
                    for event in events:
                        yield event
                    if until_started and stream.command_id is not None:
                        return
            finally:
                await answer.close()
            reason = "the connection ended before the command did"
        except TransportFailure as failure:
            reason = failure.reason
        except LimitReached as full:
            if stream.command_id is not None or full.details.get("limit") not in _QUEUED_FOR:
                raise
            error, reason = full, full.what
        if stream.ended is None:
            if stream.offsets != before:
                retry.progress()
            delay = retry.after_failure(TransportFailure(reason, sent=True))
            if delay is None:
                raise error or stream.cut_error(reason)
            stream.reconnected()
            await sleep(delay)


async def _open_stream(
    gateway: AsyncGateway, stream: CommandStream, *, body: bytes | None, key: str, tail: int | None
) -> Any:
    if stream.command_id is None:
        return await gateway.open(
            "POST",
            f"{gateway.root}/commands",
            query={"tail": tail},
            headers={"idempotency-key": key, **_JSON},
            content=body,
        )
    path = f"{gateway.root}/commands/{quote(stream.command_id, safe='')}/stream"
    return await gateway.open("GET", path, query={**stream.offsets, "tail": tail})


async def kill_command(gateway: AsyncGateway, command_id: str, signal: str) -> None:
    path = f"{gateway.root}/commands/{quote(command_id, safe='')}/kill"
    await gateway.call("POST", path, headers=_JSON, content=json.dumps({"signal": signal}).encode())


async def _post_stdin(gateway: AsyncGateway, command_id: str, piece: bytes, *, offset: int, end: bool = False) -> None:
    path = f"{gateway.root}/commands/{quote(command_id, safe='')}/stdin"
    answer = await gateway.call(
        "POST", path, query={"offset": offset, "end": end or None}, content=piece, read_timeout_s=STDIN_TIMEOUT_S
    )
    return json.loads(answer.body or b"{}").get("open") is not False
