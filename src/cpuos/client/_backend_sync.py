"""The few primitives that the client needs of its world, for plain code. `_backend_async` has the same names."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from cpuos.client._http import CONNECT_TIMEOUT_S, TransportFailure, websocket_options

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

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
Lock = threading.Lock
sleep = time.sleep


def connect_socket(host: str, port: int) -> socket.socket:
    """A non-blocking TCP connection; TransportFailure when there is none to be had."""
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        raise TransportFailure(str(error) or "no connection within 5 s", sent=False) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def wait_ready(connection: socket.socket, *, read: bool, write: bool, timeout_s: float) -> bool:
    """Wait until it can be read or written; True when it can be read. TimeoutError when neither comes in time."""
    poller = select.poll()
    poller.register(connection, (select.POLLIN if read else 0) | (select.POLLOUT if write else 0))
    found = poller.poll(timeout_s * 1000)
    if not found:
        raise TimeoutError("nothing came in time")
    return bool(found[0][1] & (select.POLLIN | select.POLLHUP | select.POLLERR))


class WebSocket:
    """Binary messages both ways."""

    def __init__(self, connection: ClientConnection, opened: ExitStack) -> None:
        self._connection = connection
        self._opened = opened

    @classmethod
    def connect(cls, url: str, headers: Mapping[str, str]) -> WebSocket:
        # Imported here: only terminals need it.
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        try:
            opened = ExitStack()
            connecting = connect(url, additional_headers=dict(headers), **websocket_options(url))
            return cls(opened.enter_context(connecting), opened)
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
        self._opened.close()


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


def call_each(callback: Callable[[str], Any], lines: list[str]) -> None:
    """One call for each line, in order."""
    deque(map(callback, lines), maxlen=0)  # a loop in Python takes longer than a small callback


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
