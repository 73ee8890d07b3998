"""One connection to an agent: requests one after the other, or, after an upgrade, frames both ways.

Received bytes lie in one buffer that grows while data comes in bulk. In HTTP the reader takes them out and the socket
is paused while the buffer is full; frames are handed to the sink as they arrive.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from cpuos.errors import AgentFailure, CpuosError
from cpuos.gateway.agent.frames import agent_frames
from cpuos.gateway.agent.http import MAX_HEAD_BYTES, AnswerHead, AnswerParser, ChunkedDecoder, agent_invalid
from cpuos.gateway.bulk import Buffer, Carried, Pipe, carry, duplicate_of
from cpuos.types.frames import FrameKind

__all__ = ["AgentConnection", "AgentTimes", "FrameSink", "agent_unresponsive", "open_connection"]

SMALL_BUFFER = MAX_HEAD_BYTES + 4096
LARGE_BUFFER = 512 << 10
WRITE_HIGH_WATER = 256 << 10


@dataclass(frozen=True, kw_only=True)
class AgentTimes:
    """How long an agent may take, in seconds."""

    connect_s: float = 2.0
    answer_s: float = 30.0
    """Until an answer's head is whole, a JSON body is whole, or more of a streamed body comes."""
    identity_s: float = 5.0
    slow_answer_s: float = 120.0
    """For what works on many files or waits for a disk."""
    freeze_s: float = 45.0
    """5 s for the processes; a slow disk has much to write."""


class FrameSink(Protocol):
    """Takes what an upgraded connection brings. An exception from `frame` closes the connection with that error."""

    def opened(self, connection: AgentConnection) -> None:
        """The upgrade was accepted; frames follow."""
        ...

    def frame(self, kind: FrameKind, offset: int, payload: memoryview | bytes) -> None: ...

    def cut(self, error: CpuosError | None) -> None:
        """The connection ended; None: between two frames, by the agent or by us."""
        ...


def agent_unresponsive(why: str) -> AgentFailure:
    """The one error for an agent that does not answer."""
    return AgentFailure("cannot reach the sandbox's agent", why, code="agent_unresponsive")


async def open_connection(
    guest: socket.socket, address: tuple[str, int] | str, *, times: AgentTimes, limit_s: float | None = None
) -> AgentConnection:
    """Connect a socket that the node made; closes it on failure."""
    loop = asyncio.get_running_loop()
    limit_s = times.connect_s if limit_s is None else limit_s
    try:
        async with asyncio.timeout(limit_s):
            await _connect(loop, guest, address)
        if guest.family in (socket.AF_INET, socket.AF_INET6):
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _, connection = await loop.create_connection(lambda: AgentConnection(loop, times=times), sock=guest)
    except (OSError, TimeoutError) as error:
        guest.close()
        raise agent_unresponsive(str(error) or f"no connection within {limit_s:g} s") from error
    except BaseException:
        guest.close()
        raise
    return connection


async def _connect(loop: asyncio.AbstractEventLoop, guest: socket.socket, address: tuple[str, int] | str) -> None:
    """As `loop.sock_connect`, which looks an address up in a thread even where it is a number."""
    error = guest.connect_ex(address)
    if error == errno.EINPROGRESS:
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(guest, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_writer(guest)
        error = guest.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


class AgentConnection(asyncio.BufferedProtocol):
    """See the module's text. Not for two users at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, times: AgentTimes) -> None:
        self._loop = loop
        self._times = times
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(SMALL_BUFFER)
        self._start = 0
        self._end = 0
        self._reading_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._writing_paused = False
        self._error: CpuosError | None = None
        self._eof = False
        self._pieces = agent_frames()
        self._sink: FrameSink | None = None
        self.when_closed: Callable[[], None] | None = None
        """Called once the socket is not used any more."""
        self.answered = False
        """Bytes of the answer to the last request have come."""

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._sink is None and self._start and self._end == len(self._buffer):
            self._compact()
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        full = self._end + nbytes == len(self._buffer)
        self.answered = True
        if self._sink is not None:
            self._hand_out(memoryview(self._buffer)[:nbytes])
            if full and len(self._buffer) < LARGE_BUFFER:
                self._buffer = bytearray(min(len(self._buffer) * 4, LARGE_BUFFER))
            return
        self._end += nbytes
        if full and not self._start:
            if len(self._buffer) < LARGE_BUFFER:
                self._buffer = self._buffer + bytearray(min(len(self._buffer) * 3, LARGE_BUFFER - len(self._buffer)))
            else:
                self._reading_paused = True
                self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._eof = True
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._eof = True
        if self.when_closed is not None:
            self._loop.call_soon(self.when_closed)
            self.when_closed = None
        if error is not None and self._error is None:
            self._error = agent_unresponsive(f"the connection broke: {error}")
        self._wake()
        if self._sink is not None:
            sink, self._sink = self._sink, None
            cut = self._error
            if cut is None and not self._pieces.whole:
                cut = agent_unresponsive("the stream was cut within a frame")
            sink.cut(cut)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # requests

    @property
    def usable(self) -> bool:
        """Idle and open: another request may be sent."""
        return not self._eof and self._error is None and self._end == self._start and not self.closing

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """End the connection now; what was not sent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def cut(self) -> None:
        """As `close`, for whoever uses it: also for one who carries a body by a duplicate of the socket."""
        if not self.closing:
            with suppress(OSError), duplicate_of(self._transport) as twin:  # it may have ended already
                twin.shutdown(socket.SHUT_RDWR)
        self.close()

    def write(self, data: bytes) -> None:
        """Send without waiting; for a bounded amount."""
        if not self.closing:
            self._transport.write(data)

    async def send(self, data: bytes) -> None:
        """Send and wait until the socket takes more; returns early when an answer has come already."""
        self.write(data)
        if self._writing_paused and not self.closing:
            self._drained = self._loop.create_future()
            await self._in_time(self._drained)

    async def _in_time(self, drained: asyncio.Future[None]) -> None:
        limit_s = self._times.answer_s
        try:
            async with asyncio.timeout(limit_s):
                await drained
        except TimeoutError:
            raise agent_unresponsive(f"it took no data for {limit_s:g} s") from None

    async def send_from(self, source: socket.socket, count: int, carried: Carried) -> None:
        """Send `count` bytes of another socket; stops early when an answer has come. For the last of a request."""
        limit_s = self._times.answer_s
        self._transport.set_write_buffer_limits(high=0)
        self._drained = self._loop.create_future()  # settled also when an answer comes, or the end
        if self._transport.get_write_buffer_size() and not self.answer_came:
            await self._in_time(self._drained)
        stop = self._drained = self._loop.create_future()
        if self.answer_came or self.closing:
            return
        with duplicate_of(self._transport) as target, Pipe() as hold:
            try:
                await carry(source, target, count, hold=hold, carried=carried, give_up=stop, write_limit_s=limit_s)
            except TimeoutError:
                raise agent_unresponsive(f"it took no data for {limit_s:g} s") from None

    async def body_into(
        self, target: socket.socket, count: int, *, carried: Carried, give_up: asyncio.Future[Any]
    ) -> None:
        """The next `count` bytes of a body of known length into another socket; none of them have been read yet."""
        limit_s = self._times.answer_s
        if not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
        with duplicate_of(self._transport) as source, Buffer(source, count) as hold:
            try:
                await carry(source, target, count, hold=hold, carried=carried, give_up=give_up, read_limit_s=limit_s)
            except TimeoutError:
                raise agent_unresponsive(f"no more of its answer came for {limit_s:g} s") from None
        self._reading_paused = False
        if not self.closing:
            self._transport.resume_reading()

    @property
    def answer_came(self) -> bool:
        """Something of the answer is here, or the connection is gone."""
        return self._end > self._start or self._eof

    def request(self, head: bytes, body: bytes = b"") -> None:
        """Send one request whose body is at hand."""
        self.answered = False
        self.write(head + body if body else head)

    async def read_head(self, *, limit_s: float | None = None) -> AnswerHead:
        """The head of the answer; interim answers are passed over."""
        limit_s = self._times.answer_s if limit_s is None else limit_s
        parser = AnswerParser()
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    head, self._start = parser.parse(self._buffer, self._start, self._end)
                    if head is not None:
                        return head
                    await self._more()
        except TimeoutError:
            raise agent_unresponsive(f"it did not answer within {limit_s:g} s") from None

    async def read_body(self, head: AnswerHead, *, limit: int) -> bytes:
        """The whole body, which must not be over `limit` bytes."""
        limit_s = self._times.answer_s
        if head.length is not None and head.length > limit:
            raise agent_invalid(f"its answer is over {limit} bytes")
        pieces = []
        size = 0
        try:
            async with asyncio.timeout(limit_s):
                async for piece in self.body(head):
                    size += len(piece)
                    if size > limit:
                        raise agent_invalid(f"its answer is over {limit} bytes")
                    pieces.append(piece)
        except TimeoutError:
            raise agent_unresponsive(f"its answer did not end within {limit_s:g} s") from None
        return b"".join(pieces)

    async def body(self, head: AnswerHead) -> AsyncIterator[bytes]:
        """The body in pieces as they come. A body that ends early raises; the connection then is of no more use."""
        if head.length is None:
            decoder = ChunkedDecoder()
            while not decoder.done:
                for piece in decoder.feed(await self._take(LARGE_BUFFER)):
                    yield piece
            return
        left = head.length
        while left:
            piece = await self._take(left)
            left -= len(piece)
            yield piece

    async def body_begin(self, most: int) -> bytes:
        """What has come of a body, up to `most` bytes; empty when nothing has."""
        return await self._take(most) if self._end > self._start else b""

    def upgrade(self, sink: FrameSink) -> None:
        """From here on frames: what has come already is handed to the sink before this returns."""
        rest = bytes(memoryview(self._buffer)[self._start : self._end])
        self._start = self._end = 0
        self._sink = sink
        sink.opened(self)
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if rest:
            self._hand_out(memoryview(rest))
        if self._eof and self._sink is not None:
            self._loop.call_soon(self.connection_lost, None)

    def hand_over(self, protocol: asyncio.BaseProtocol) -> bytes:
        """From here on another protocol's: it gets what comes from now on, and what has come already is returned."""
        rest = bytes(memoryview(self._buffer)[self._start : self._end])
        self._start = self._end = 0
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        self._transport.resume_reading()
        return rest

    def shrink(self) -> None:
        """Give the large buffer back; for a stream that fell silent. Not from within a sink's `frame`."""
        if self._sink is not None and len(self._buffer) > SMALL_BUFFER:
            self._buffer = bytearray(SMALL_BUFFER)

    # inner

    def _hand_out(self, data: memoryview) -> None:
        try:
            for kind, offset, payload in self._pieces.feed(data):
                self._sink.frame(kind, offset, payload)
                if self._sink is None:
                    return
        except CpuosError as error:
            self._error = error
            self.close()

    def _compact(self) -> None:
        self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
        self._end -= self._start
        self._start = 0

    async def _take(self, most: int) -> bytes:
        if self._start == self._end:
            limit_s = self._times.answer_s
            try:
                async with asyncio.timeout(limit_s):
                    while self._start == self._end:
                        await self._more()
            except TimeoutError:
                raise agent_unresponsive(f"no more of its answer came for {limit_s:g} s") from None
        stop = min(self._end, self._start + most)
        piece = bytes(memoryview(self._buffer)[self._start : stop])
        self._start = stop
        if self._start == self._end:
            self._start = self._end = 0
            if self._reading_paused:
                self._reading_paused = False
                if not self.closing:
                    self._transport.resume_reading()
        return piece

    async def _more(self) -> None:
        """Wait for bytes behind `_end`."""
        if self._error is not None:
            raise self._error
        if self._eof:
            raise agent_unresponsive("it closed the connection before its answer was whole")
        if self._start and self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            self._compact()
        if self._end == len(self._buffer):
            raise agent_invalid(f"its answer's head is over {MAX_HEAD_BYTES} bytes")
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        for future in (self._waiter, self._drained):
            if future is not None and not future.done():
                future.set_result(None)
