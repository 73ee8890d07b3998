"""The two sockets of a sandbox, read a few questions at a time.

What a sandbox sends too much waits in its own socket's buffer, and what does not fit there is dropped by the kernel: so
every sandbox has a turn each time the loop goes round, however many questions another one has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Coroutine
from typing import Any

from cpuos.node.network.forwarder.query import Query
from cpuos.node.network.forwarder.sandbox import SandboxForwarder

__all__ = ["DatagramListener", "StreamListener"]

_TURN = 8  # questions of one sandbox before another's turn
_QUERY_BYTES = 2048
_BUFFER_BYTES = 64 << 10
_IDLE_S = 10.0
_SLOW_S = 5.0
_STREAM_QUERIES = 200
_TROUBLE_S = 0.5  # descriptors are short, or a socket is broken: it is tried again, and not all the time
_PASSING = {errno.EAGAIN, errno.EINTR, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM}


class _Tasks:
    """Tasks that end with their listener."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class DatagramListener:
    """Serves `end` until it is closed; it owns the socket."""

    def __init__(self, end: socket.socket, forwarder: SandboxForwarder) -> None:
        self._end, self._forwarder = end, forwarder
        self._loop = asyncio.get_running_loop()
        self._tasks = _Tasks()
        self._pause: asyncio.TimerHandle | None = None
        end.setblocking(False)
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._loop.add_reader(end.fileno(), self._read)

    async def close(self) -> None:
        self._loop.remove_reader(self._end.fileno())
        if self._pause is not None:
            self._pause.cancel()
        await self._tasks.close()
        self._end.close()

    def _read(self) -> None:
        for _ in range(_TURN):
            wait_s = self._forwarder.wait_s()
            if wait_s > 0:
                self._pause_for(wait_s)
                return
            try:
                data, sender = self._end.recvfrom(_QUERY_BYTES)
            except OSError as problem:
                if problem.errno not in _PASSING:
                    self._pause_for(_TROUBLE_S)
                return
            with self._forwarder.measured():
                self._take(data, sender)

    def _pause_for(self, wait_s: float) -> None:
        self._loop.remove_reader(self._end.fileno())
        self._pause = self._loop.call_later(wait_s, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._end.fileno(), self._read)

    def _take(self, data: bytes, sender: Any) -> None:
        query = self._forwarder.read(data, is_stream=False)
        answer = self._forwarder.answer_now(query) if isinstance(query, Query) else query
        if answer is not None:
            self._send(answer, sender)
        elif isinstance(query, Query):
            self._tasks.start(self._answer_later(query, sender))

    async def _answer_later(self, query: Query, sender: Any) -> None:
        self._send(await self._forwarder.answer_later(query), sender)

    def _send(self, answer: bytes, receiver: Any) -> None:
        with contextlib.suppress(OSError):  # a datagram may be lost; the guest asks again
            self._end.sendto(answer, receiver)


class StreamListener:
    """Serves connections to the listening `end` until it is closed; it owns the socket."""

    def __init__(self, end: socket.socket, forwarder: SandboxForwarder, *, most: int) -> None:
        self._end, self._forwarder, self._most = end, forwarder, most
        self._loop = asyncio.get_running_loop()
        self._tasks = _Tasks()
        self._pause: asyncio.TimerHandle | None = None
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._accept)

    async def close(self) -> None:
        self._loop.remove_reader(self._end.fileno())
        if self._pause is not None:
            self._pause.cancel()
        await self._tasks.close()
        self._end.close()

    def _accept(self) -> None:
        wait_s = self._forwarder.wait_s()
        if wait_s > 0:
            self._pause_for(wait_s)
            return
        with self._forwarder.measured():
            try:
                connection, _ = self._end.accept()
            except OSError as problem:
                if problem.errno not in _PASSING:
                    self._pause_for(_TROUBLE_S)
                return
            if len(self._tasks) >= self._most:
                connection.close()
                return
            connection.setblocking(False)
            self._tasks.start(self._serve(connection))

    def _pause_for(self, wait_s: float) -> None:
        self._loop.remove_reader(self._end.fileno())
        self._pause = self._loop.call_later(wait_s, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._end.fileno(), self._accept)

    async def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, TimeoutError, EOFError):
            for _ in range(_STREAM_QUERIES):
                async with asyncio.timeout(_IDLE_S):
                    length = int.from_bytes(await self._read_exactly(connection, 2), "big")
                if length > _QUERY_BYTES:
                    return
                async with asyncio.timeout(_SLOW_S):
                    data = await self._read_exactly(connection, length)
                while (wait_s := self._forwarder.wait_s()) > 0:  # noqa: ASYNC110 - time itself is what is waited for
                    await asyncio.sleep(wait_s)
                answer = await self._answer(data)
                if answer is None:
                    return
                async with asyncio.timeout(_SLOW_S):
                    await self._loop.sock_sendall(connection, len(answer).to_bytes(2, "big") + answer)

    async def _answer(self, data: bytes) -> bytes | None:
        with self._forwarder.measured():
            query = self._forwarder.read(data, is_stream=True)
            answer = self._forwarder.answer_now(query) if isinstance(query, Query) else query
        if answer is None and isinstance(query, Query):
            answer = await self._forwarder.answer_later(query)
        return answer

    async def _read_exactly(self, connection: socket.socket, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            chunk = await self._loop.sock_recv(connection, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)
