"""The few primitives that the client needs of its world, for async code. `_backend_sync` has the same names."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.from_thread
import anyio.to_thread
import httpx2

from cpuos.client._http import Answer, TransportFailure
from cpuos.client._transport import as_failure, pool_options, timeouts, websocket_options

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = [
    "Background",
    "Http",
    "Lock",
    "StreamAnswer",
    "WebSocket",
    "call_blocking",
    "consume_blocking",
    "is_stream",
    "iterate_blocking",
    "iterate_ready",
    "maybe_await",
    "shielded",
    "sleep",
]

T = TypeVar("T")
Lock = anyio.Lock
sleep = anyio.sleep
# What one hop between the event loop and a worker thread carries.
_HOP_BYTES = 1 << 20


class Http:
    """Connections to any number of origins. Usable again after `close`, which ends the open connections."""

    def __init__(self) -> None:
        self._transports: dict[str, httpx2.AsyncHTTPTransport] = {}

    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None = None,
        read_timeout_s: float | None = None,
    ) -> StreamAnswer:
        """Send a request; the answer's body is still to come. Raises only TransportFailure."""
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        transport = self._transports.get(origin)
        if transport is None:
            transport = self._transports[origin] = httpx2.AsyncHTTPTransport(**pool_options(url))
        request = httpx2.Request(method, url, headers=headers, content=content, extensions=timeouts(read_timeout_s))
        try:
            return StreamAnswer(await transport.handle_async_request(request))
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

    async def request(self, method: str, url: str, **options: Any) -> Answer:
        answer = await self.open(method, url, **options)
        try:
            return Answer(status=answer.status, headers=answer.headers, body=await answer.read())
        finally:
            await answer.close()

    async def close(self) -> None:
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.aclose()


class StreamAnswer:
    """An answer whose body comes in pieces. Close it in any case."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes off the wire; a body that stops early raises TransportFailure."""
        try:
            async for chunk in self._response.stream:  # type: ignore[union-attr]
                yield chunk
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def close(self) -> None:
        try:
            await self._response.aclose()
        except httpx2.HTTPError as error:
            raise as_failure(error) from error


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


async def maybe_await(value: Any) -> Any:
    """Callbacks may be plain functions or coroutine functions."""
    return await value if inspect.isawaitable(value) else value


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
