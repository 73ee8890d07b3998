"""Tunnels of the fake agent: the host's connection joined to a server on the loopback, which guest and host share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from cpuos.testing.fake_http import GuestError, HttpRequest

__all__ = ["AGENT_PORT", "MAX_TUNNELS", "FakePorts"]

AGENT_PORT = 1
MAX_TUNNELS = 256
DIAL_LIMIT_S = 2.0
PIECE_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)


class FakePorts:
    """The open tunnels of one agent."""

    def __init__(self) -> None:
        self._open = 0

    async def connect(self, request: HttpRequest, text: str) -> None:
        """Join the request's connection to the port that `text` names, until both sides have ended or one failed."""
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
            raise GuestError("invalid", f"a port is 1 to 65535, not {text}")
        if not request.wants("tunnel"):
            raise GuestError("invalid", "this call needs Upgrade: tunnel")
        if int(text) == AGENT_PORT:
            raise GuestError("port_forbidden", f"port {text} is the agent's own")
        if self._open >= MAX_TUNNELS:
            raise GuestError("limit_reached", f"{MAX_TUNNELS} tunnels are open")
        self._open += 1
        try:
            await self._join(request, int(text))
        finally:
            self._open -= 1

    async def _join(self, request: HttpRequest, port: int) -> None:
        reader, writer = await _dial(port)
        try:
            await request.upgrade()
            async with asyncio.TaskGroup() as both:
                both.create_task(_relay(request.reader, writer))
                both.create_task(_relay(reader, request.writer))
        except* OSError:
            for side in (writer, request.writer):
                _reset(side)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _dial(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(DIAL_LIMIT_S):
            for address in ("127.0.0.1", "::1"):
                with contextlib.suppress(OSError):
                    return await asyncio.open_connection(address, port)
    raise GuestError("port_not_open", f"nothing inside answers on port {port}")


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(PIECE_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    guest = writer.get_extra_info("socket")
    if guest.family != socket.AF_UNIX:
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
