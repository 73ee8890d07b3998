"""The few primitives that the client needs of its world, for plain code. `_backend_async` has the same names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from cpuos.client._http import Answer, TransportFailure
from cpuos.client._transport import as_failure, pool_options, timeouts, websocket_options

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

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
Lock = threading.Lock
sleep = time.sleep


class Http:
    """Connections to any number of origins, for any number of threads. Usable again after `close`."""

    def __init__(self) -> None:
        self._transports: dict[str, httpx2.HTTPTransport] = {}
        # Guards the making of transports: two threads must not make two for one origin.
        self._lock = threading.Lock()

    def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        content: bytes | Iterable[bytes] | None = None,
        read_timeout_s: float | None = None,
    ) -> StreamAnswer:
        """Send a request; the answer's body is still to come. Raises only TransportFailure."""
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        transport = self._transports.get(origin)
        if transport is None:
            with self._lock:
                transport = self._transports.get(origin) or httpx2.HTTPTransport(**pool_options(url))
                self._transports[origin] = transport
        request = httpx2.Request(method, url, headers=headers, content=content, extensions=timeouts(read_timeout_s))
        try:
            return StreamAnswer(transport.handle_request(request))
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

    def request(self, method: str, url: str, **options: Any) -> Answer:
        answer = self.open(method, url, **options)
        try:
            return Answer(status=answer.status, headers=answer.headers, body=answer.read())
        finally:
            answer.close()

    def close(self) -> None:
        with self._lock:
            transports, self._transports = self._transports, {}
        for transport in transports.values():
            transport.close()


class StreamAnswer:
    """An answer whose body comes in pieces. Close it in any case."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    def chunks(self) -> Iterator[bytes]:
        """The body as it comes off the wire; a body that stops early raises TransportFailure."""
        try:
            yield from self._response.stream  # type: ignore[misc]
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

    def read(self) -> bytes:
        return b"".join(self.chunks())

    def close(self) -> None:
        try:
            self._response.close()
        except httpx2.HTTPError as error:
            raise as_failure(error) from error


class WebSocket:
    """Binary messages both ways."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, url: str, headers: Mapping[str, str]) -> WebSocket:
        # Imported here: only terminals need it.
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        try:
            return cls(connect(url, additional_headers=dict(headers), **websocket_options(url)))
        except (OSError, WebSocketException) as error:
            raise TransportFailure(str(error) or type(error).__name__, sent=False) from error

    def send(self, message: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._connection.send(message)
        except ConnectionClosed as error:
            raise TransportFailure(str(error), sent=True) from error

    def receive(self) -> bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            message = self._connection.recv()
        except ConnectionClosed as error:
            raise TransportFailure(str(error), sent=True) from error
        return message.encode() if isinstance(message, str) else message

    def close(self) -> None:
        self._connection.close()


class Background:
    """Runs something in a thread beside the body of the `with`. It must not raise."""

    def __enter__(self) -> Background:
        return self

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        # Not joined: what it waits for ends with the command, and the caller has its result already.
        threading.Thread(target=function, args=args, daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def shielded(function: Callable[..., T], *args: Any, timeout_s: float) -> T | None:
    """Plain code is not cancelled; the calls inside have time limits of their own."""
    return function(*args)


def maybe_await(value: Any) -> Any:
    return value


def call_blocking(function: Callable[..., T], *args: Any) -> T:
    return function(*args)


def is_stream(data: Any) -> bool:
    return False


def iterate_ready(iterator: Iterator[bytes]) -> Iterator[bytes]:
    return iterator


def iterate_blocking(iterator: Iterator[bytes]) -> Iterator[bytes]:
    return iterator


def consume_blocking(chunks: Iterator[bytes], function: Callable[[Iterator[bytes]], T]) -> T:
    return function(chunks)
