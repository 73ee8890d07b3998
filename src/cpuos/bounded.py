"""uvicorn's HTTP protocol with heads of bounded size and time: else they hold memory and connections for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HEAD_S", "MAX_CONNECTIONS", "MAX_HEAD_BYTES", "BoundedProtocol"]

MAX_HEAD_BYTES = 32 << 10
HEAD_S = 30.0
"""From a connection's begin, or a head's first byte, to the head's end."""
MAX_CONNECTIONS = 2048

log = structlog.get_logger("bounded")


class BoundedProtocol(HttpToolsProtocol):
    """Whoever reaches the port may send heads; what they cost ends here, before any key is looked at."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self._head_bytes = 0
        self._unread_bytes = 0
        """Of a head that is not whole yet: the parser tells a header only when it has all of it."""
        self._in_body = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            log.warning("connections.full", limit=MAX_CONNECTIONS)
            transport.abort()
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            return
        if self._unread_bytes > MAX_HEAD_BYTES and not self._in_body:
            self._give_up()
        elif self._timer is None and self.timeout_keep_alive_task is None:
            # Also behind an early answer: the rest of such a body is read for a while, so that the answer is.
            self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("request head over its limit")

    def _stop_waiting(self) -> None:
        self._unread_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self.transport.abort()
