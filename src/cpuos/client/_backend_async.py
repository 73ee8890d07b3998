"""The few primitives that the client needs of its world, for async code. `_backend_sync` has the same names."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from cpuos.client._http import CONNECT_TIMEOUT_S, TransportFailure, websocket_options

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = [
    "Background",
    "Lock",
    "WebSocket",
    "call_blocking",
    "call_each",
    "connect_socket",
    "consume_blocking",
    "is_stream",
    "iterate_blocking",
    "iterate_ready",
    "shielded",
    "sleep",
    "wait_ready",
]

T = TypeVar("T")
Lock = anyio.Lock
sleep = anyio.sleep
# What one hop between the event loop and a worker thread carries.
_HOP_BYTES = 1 << 20


async def connect_socket(host: str, port: int) -> socket.socket:
    """A non-blocking TCP connection; TransportFailure when there is none to be had."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            places = await _resolve(loop, host, port)
            for last, (family, address) in zip(range(len(places) - 1, -1, -1), places, strict=True):
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    await loop.sock_connect(connection, address)
                    return connection
                except BaseException as error:
                    connection.close()
                    if last == 0 or not isinstance(error, OSError):
                        raise
    except (OSError, TimeoutError) as error:
        raise TransportFailure(str(error) or "no connection within 5 s", sent=False) from error
    raise TransportFailure(f"{host} has no address", sent=False)


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[tuple[int, Any]]:
    try:
        # Numbers need no thread.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


async def wait_ready(connection: socket.socket, *, read: bool, write: bool, timeout_s: float) -> bool:
    """Wait until it can be read or written; True when it can be read. TimeoutError when neither comes in time."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()
    number = connection.fileno()

    def settle(readable: bool) -> None:
        if not ready.done():
            ready.set_result(readable)

    def expire() -> None:
        if not ready.done():
            ready.set_exception(TimeoutError("nothing came in time"))

    if read:
        loop.add_reader(number, settle, True)
    if write:
        loop.add_writer(number, settle, False)
    timer = loop.call_later(
        timeout_s, lambda: ready.done() or ready.set_exception(TimeoutError("nothing came in time"))
    )
    try:
        return await ready
    finally:
        timer.cancel()
        loop.remove_reader(number)
        loop.remove_writer(number)


class WebSocket:
    """Binary messages both ways."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, url: str, headers: Mapping[str, str]) -> WebSocket:
        # Imported here: only terminals need it.
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            return cls(await connect(url, additional_headers=dict(headers), **websocket_options(url)))
        except (OSError, WebSocketException) as error:
            raise TransportFailure(str(error) or type(error).__name__, sent=False) from error

    async def send(self, message: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise TransportFailure(str(error), sent=True) from error

    async def receive(self) -> bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            message = await self._connection.recv()
        except ConnectionClosed as error:
            raise TransportFailure(str(error), sent=True) from error
        return message.encode() if isinstance(message, str) else message

    async def close(self) -> None:
        await self._connection.close()


class Background:
    """Runs something beside the body of the `with`; it is cancelled when the body ends. It must not raise."""

    def __init__(self) -> None:
        self._group = anyio.create_task_group()

    async def __aenter__(self) -> Background:
        await self._group.__aenter__()
        return self

    def start(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self._group.start_soon(function, *args)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.cancel_scope.cancel()
        # The body's own error is not given to the group, which would wrap it.
        await self._group.__aexit__(None, None, None)


async def shielded(function: Callable[..., Awaitable[T]], *args: Any, timeout_s: float) -> T | None:
    """Run to the end though the caller is being cancelled, but not longer than this."""
    with anyio.move_on_after(timeout_s, shield=True):
        return await function(*args)
    return None


async def call_each(callback: Callable[[str], Any], lines: list[str]) -> None:
    """One call for each line, in order. Callbacks may be plain functions or coroutine functions."""
    for line in lines:
        value = callback(line)
        if value is not None and inspect.isawaitable(value):
            await value


async def call_blocking(function: Callable[..., T], *args: Any) -> T:
    """Run file work beside the event loop. A cancelled caller does not wait for it: a terminal may never answer."""
    return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=True)


def is_stream(data: Any) -> bool:
    """True for what is iterated over without a thread of its own."""
    return hasattr(data, "__aiter__")


async def iterate_ready(iterator: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Walk through an iterator that never waits."""
    for chunk in iterator:
        yield chunk


async def iterate_blocking(iterator: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Walk through an iterator that reads files."""
    while (chunk := await anyio.to_thread.run_sync(next, iterator, None)) is not None:
        yield chunk


async def consume_blocking(chunks: AsyncIterator[bytes], function: Callable[[Iterator[bytes]], T]) -> T:
    """Give arriving bytes to a function that writes files."""

    async def pull() -> bytes:
        pieces, size = [], 0
        async for chunk in chunks:
            pieces.append(chunk)
            size += len(chunk)
            if size >= _HOP_BYTES:
                break
        return b"".join(pieces)

    def arriving() -> Iterator[bytes]:
        while chunk := anyio.from_thread.run(pull):
            yield chunk

    return await anyio.to_thread.run_sync(function, arriving())
