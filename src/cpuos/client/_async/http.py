"""HTTP over the client's own connections: plain HTTP/1.1 by sockets, TLS and proxies by httpx2.

Most calls go to a gateway on the same machine, where an HTTP library costs more than the network. Sockets are
non-blocking in both worlds; only `wait_ready` differs.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from io import BytesIO
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from cpuos.client._backend_async import connect_socket, wait_ready
from cpuos.client._http import Answer, TransportFailure, needs_httpx
from cpuos.client._wire import AnswerParser, WireError, encode_head

__all__ = ["AsyncHttp", "AsyncStreamAnswer"]

READ_TIMEOUT_S = 40.0
"""Streams carry a KEEPALIVE each 5 s, and answers come within the gateway's own 30 s towards the agent."""
RECEIVE_BYTES = (1 << 18) + 4096
"""A whole piece of the gateway's, with what is around it."""
MAX_IDLE = 64
# Larger bodies are collected in pieces: a length is only the other side's word.
MAX_PREPARED = 1 << 30


class AsyncStreamAnswer(Protocol):
    """An answer whose body comes in pieces. Close it in any case."""

    status: int
    headers: Mapping[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes; one that stops early raises TransportFailure."""

    async def read(self) -> bytes: ...

    async def close(self) -> None: ...


class AsyncHttp:
    """Connections to any number of origins. Usable again after `close`, which ends the idle ones."""

    def __init__(self) -> None:
        self._origins: dict[str, _Origin] = {}

    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncStreamAnswer:
        """Send a request; the answer's body is still to come. Raises only TransportFailure."""
        scheme, rest = url.split("://", 1)
        place, slash, target = rest.partition("/")
        key = f"{scheme}://{place}"
        origin = self._origins.get(key)
        if origin is None:
            origin = self._origins.setdefault(key, _make_origin(key))
        return await origin.open(
            method,
            slash + target or "/",
            headers=headers,
            content=content,
            read_timeout_s=READ_TIMEOUT_S if read_timeout_s is None else read_timeout_s,
        )

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None = None,
    ) -> Answer:
        """The whole answer."""
        answer = await self.open(method, url, headers=headers, content=content)
        try:
            return Answer(status=answer.status, headers=answer.headers, body=await answer.read())
        finally:
            await answer.close()

    async def close(self) -> None:
        """End the idle connections."""
        origins, self._origins = self._origins, {}
        for origin in origins.values():
            await origin.close()


class _Origin(Protocol):
    async def open(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None,
        read_timeout_s: float,
    ) -> AsyncStreamAnswer: ...

    async def close(self) -> None: ...


def _make_origin(url: str) -> _Origin:
    if needs_httpx(url):
        from cpuos.client._httpx_async import HttpxOrigin

        return HttpxOrigin(url)
    return _SocketOrigin(urlsplit(url))


class _SocketOrigin:
    """A server reached by plain TCP, and the idle connections to it."""

    def __init__(self, parts: SplitResult) -> None:
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self._name = parts.netloc
        # append and pop of a list are atomic, so threads need no lock.
        self._idle: list[socket.socket] = []
        self._closed = False

    async def open(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None,
        read_timeout_s: float,
    ) -> AsyncStreamAnswer:
        connection = self._take_idle()
        reused = connection is not None
        if connection is None:
            connection = await connect_socket(self._host, self._port)
        answer = _SocketAnswer(self, connection, read_timeout_s)
        try:
            await answer.begin(method, target, self._name, headers=headers, content=content)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | WireError):
                # An idle connection that the server was just closing looks so; a new one will do.
                stale = reused and not answer.arrived
                raise TransportFailure(str(error) or type(error).__name__, sent=True, stale=stale) from error
            raise
        return answer

    def give_back(self, connection: socket.socket) -> None:
        if len(self._idle) < MAX_IDLE and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()

    def _take_idle(self) -> socket.socket | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            try:
                # Nothing can have come but the end.
                connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return connection
            except OSError:
                pass
            connection.close()
        return None


class _SocketAnswer:
    def __init__(self, origin: _SocketOrigin, connection: socket.socket, timeout_s: float) -> None:
        self._origin = origin
        self._connection: socket.socket | None = connection
        self._timeout_s = timeout_s
        self._parser = AnswerParser()
        self._first: list[bytes] = []
        self._sent_whole = True
        self.arrived = False

    @property
    def status(self) -> int:
        return self._parser.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._parser.headers

    async def begin(
        self,
        method: str,
        target: str,
        host: str,
        *,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None,
    ) -> None:
        """Send the request and read the answer's head."""
        whole = content is None or isinstance(content, bytes)
        length = (
            len(content or b"") if whole else int(headers["content-length"]) if "content-length" in headers else None
        )
        head = encode_head(method, target, host=host, headers=headers, body=length)
        try:
            if whole:
                self._sent_whole = await self._send(head + (content or b""))
            else:
                self._sent_whole = await self._send_pieces(head, content, length)
        except (BrokenPipeError, ConnectionResetError):
            # It may have answered before it closed.
            self._sent_whole = False
        while not self._parser.status:
            self._first = await self._receive()
        if not self._sent_whole:
            self._parser.keep_alive = False

    async def chunks(self) -> AsyncIterator[bytes]:
        first, self._first = self._first, []
        for piece in first:
            yield piece
        try:
            while not self._parser.done:
                for piece in await self._receive():
                    yield piece
        except (OSError, WireError) as error:
            raise TransportFailure(str(error) or type(error).__name__, sent=True) from error

    async def read(self) -> bytes:
        length = self._parser.left
        if self._parser.plain and RECEIVE_BYTES < length <= MAX_PREPARED:
            return await self._read_plain(length)
        return b"".join([piece async for piece in self.chunks()])

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._parser.done and self._parser.keep_alive:
            self._origin.give_back(connection)
        else:
            connection.close()

    async def _read_plain(self, length: int) -> bytes:
        """A large body of known length straight into its place: no piece is copied."""
        first = b"".join(self._first)
        self._first = []
        whole = BytesIO()
        whole.write(first)
        whole.seek(len(first) + length - 1)
        whole.write(b"\0")
        try:
            with whole.getbuffer() as view:
                at = len(first)
                while not self._parser.done:
                    count = await self._receive_into(view[at:])
                    at += count
                    self._parser.skip(count)
        except (OSError, WireError) as error:
            raise TransportFailure(str(error) or type(error).__name__, sent=True) from error
        return whole.getvalue()

    async def _receive(self) -> list[bytes]:
        assert self._connection is not None
        while True:
            try:
                data = self._connection.recv(RECEIVE_BYTES)
                break
            except BlockingIOError:
                await wait_ready(self._connection, read=True, write=False, timeout_s=self._timeout_s)
        if not data:
            self._parser.feed_end()
            return []
        self.arrived = True
        return self._parser.feed(data)

    async def _receive_into(self, view: memoryview) -> int:
        assert self._connection is not None
        while True:
            try:
                count = self._connection.recv_into(view)
                break
            except BlockingIOError:
                await wait_ready(self._connection, read=True, write=False, timeout_s=self._timeout_s)
        if not count:
            self._parser.feed_end()
        return count

    async def _send(self, data: bytes | memoryview) -> bool:
        """False when an answer came before all was sent: the rest is of no use then."""
        assert self._connection is not None
        view = memoryview(data)
        while view:
            try:
                view = view[self._connection.send(view) :]
            except BlockingIOError:
                if await wait_ready(self._connection, read=True, write=True, timeout_s=self._timeout_s):
                    return False
        return True

    async def _send_pieces(self, head: bytes, content: AsyncIterable[bytes], length: int | None) -> bool:
        sent = 0
        if not await self._send(head):
            return False
        async for piece in content:
            sent += len(piece)
            framed = (piece,) if length is not None else (b"%x\r\n" % len(piece), piece, b"\r\n")
            for part in framed if len(piece) else ():
                if not await self._send(part):
                    return False
        if length is not None and sent != length:
            raise WireError(f"the body has {sent} bytes and was announced with {length}")
        return await self._send(b"0\r\n\r\n") if length is None else True
