"""Listeners: uvicorn's HTTP protocol on sockets of ours, with bounded heads and, on unix sockets, checked peers."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httptools
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from cpuos.bounded import BoundedProtocol
from cpuos.gateway.bulk import duplicate_of

__all__ = ["WIRE", "HttpListener"]

WIRE = "cpuos.wire"
"""Where a request's scope has its connection, as an extension."""
KEEP_ALIVE_S = 75
MAX_WEBSOCKET_MESSAGE = 1 << 20
_PEER = struct.Struct("3i")

log = structlog.get_logger("gateway.serve")


class HttpListener:
    """Serves one ASGI application on one listening socket, until `aclose`."""

    def __init__(self, app: Any, listening: socket.socket, *, peers: frozenset[int] | None = None) -> None:
        self._listening = listening
        self._peers = peers
        """User ids that may connect; None: not checked."""
        for name in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # ours are structured, and hold no tickets
        self._config = Config(
            app,
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=MAX_WEBSOCKET_MESSAGE,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._config.load()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._protocol, sock=self._listening, backlog=1024)

    async def aclose(self) -> None:
        """Stop listening and cut what is open."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(OSError):
            self._listening.close()

    def _protocol(self) -> BoundedProtocol:
        peers = self._peers
        return _Protocol(
            config=self._config,
            server_state=self._state,
            app_state={},
            check=None if peers is None else lambda transport: _peer_uid(transport) in peers,
        )


class _Protocol(BoundedProtocol):
    """Peers are checked where there is a list of them."""

    def __init__(self, *, check: Callable[[asyncio.BaseTransport], bool] | None, **rest: Any) -> None:
        super().__init__(**rest)
        self._check = check

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._check is not None and not self._check(transport):
            log.warning("peer.refused", uid=_peer_uid(transport))
            transport.abort()
        super().connection_made(_HeadWithBody(transport, self.loop))  # type: ignore[arg-type]

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.scope["extensions"] = {WIRE: _Wire(self, self.cycle)}

    def on_body(self, body: bytes) -> None:
        if not self.cycle.body:
            self.cycle.body = b""  # nothing to append to: what came becomes the message without a copy
        super().on_body(body)

    def end_request(self) -> None:
        """The body is over; the parser that saw its begin did not see its end."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()


class _Wire:
    """The connection for the bodies of one request and its answer (`cpuos.gateway.bulk.Wire`)."""

    def __init__(self, protocol: _Protocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def lend_request(self) -> tuple[bytes, socket.socket]:
        self._cycle.flow.pause_reading()
        come, self._cycle.body = bytes(self._cycle.body), bytearray()
        self._cycle.message_event.clear()
        return come, duplicate_of(self._cycle.transport)

    def return_request(self, left: int) -> None:
        if self._protocol.parser is None:  # the connection is gone
            return
        self._protocol.parser = _Remainder(self._protocol, left)
        if not left:
            self._protocol.end_request()

    async def lend_answer(self) -> socket.socket:
        self._cycle.transport.set_write_buffer_limits(high=0)
        await self._cycle.flow.drain()
        return duplicate_of(self._cycle.transport)

    def return_answer(self, sent: int) -> None:
        if not self._cycle.transport.is_closing():
            self._cycle.transport.set_write_buffer_limits()
        self._cycle.expected_content_length -= sent


class _Remainder:
    """In a parser's place while the rest of a body comes that nobody wants."""

    def __init__(self, protocol: _Protocol, left: int) -> None:
        self._protocol = protocol
        self._left = left

    def feed_data(self, data: bytes) -> None:
        behind = data[self._left :]
        self._left -= min(len(data), self._left)
        if not self._left:
            self._protocol.end_request()
        if behind:
            self._protocol.parser.feed_data(behind)

    def should_upgrade(self) -> bool:
        return False


class _HeadWithBody:
    """A transport that holds an answer's head until its first body bytes come: one packet, one wake-up."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines([head, data])
        elif data[:9] == b"HTTP/1.1 ":
            self._head = bytes(data)
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head)


def _peer_uid(transport: asyncio.BaseTransport) -> int:
    peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(peer)[1]
