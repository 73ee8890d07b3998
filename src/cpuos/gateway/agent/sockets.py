"""Sockets that stand where the sandbox can be reached. A used one is disconnected and used again: that saves the node
the work of another one. connect(2) with AF_UNSPEC dissolves a TCP connection, the socket stays in its namespace.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from typing import Any, Protocol

__all__ = ["Dialled", "Dialler", "SocketStock", "duplicate"]

MOST_KEPT = 4
_NO_ADDRESS = struct.pack("=H14x", socket.AF_UNSPEC)


class Dialled(Protocol):
    """What the node gives: a socket to connect, and the signed identity for the agent."""

    @property
    def socket(self) -> Any: ...
    @property
    def address(self) -> tuple[str, int] | str: ...
    @property
    def statement(self) -> bytes: ...
    @property
    def signature(self) -> bytes: ...
    @property
    def session_key(self) -> bytes: ...


class Dialler(Protocol):
    """`cpuos.node.client.DialClient`, or a stand-in."""

    async def dial(self, sandbox_id: str, generation: int) -> Dialled: ...


class SocketStock:
    """Unconnected sockets of one sandbox generation: kept ones first, else the node is asked."""

    def __init__(self, dialler: Dialler, *, sandbox_id: str, generation: int) -> None:
        self._dialler = dialler
        self._sandbox_id = sandbox_id
        self._generation = generation
        self._kept: list[tuple[socket.socket, tuple[str, int] | str]] = []
        self._closed = False
        self._connect = ctypes.CDLL(None, use_errno=True).connect

    async def dial(self) -> Dialled:
        """Always a new one, with the identity."""
        return await self._dialler.dial(self._sandbox_id, self._generation)

    async def take(self) -> tuple[socket.socket, tuple[str, int] | str]:
        """A socket to connect, and where to."""
        if self._kept:
            return self._kept.pop()
        dialled = await self.dial()
        return dialled.socket, dialled.address

    def give(self, used: socket.socket, address: tuple[str, int] | str) -> None:
        """Take a duplicate of a socket whose connection was closed."""
        if self._closed or len(self._kept) >= MOST_KEPT or not self.disconnect(used):
            used.close()
        else:
            self._kept.append((used, address))

    def close(self) -> None:
        self._closed = True
        for kept, _ in self._kept:
            kept.close()
        self._kept.clear()

    def disconnect(self, used: socket.socket) -> bool:
        """Whether the socket, connected or refused, may be connected again."""
        if used.family != socket.AF_INET:
            return False
        return self._connect(used.fileno(), _NO_ADDRESS, len(_NO_ADDRESS)) == 0


def duplicate(guest: socket.socket) -> socket.socket | None:
    """A second descriptor of the socket, for `SocketStock.give`; None for a kind that cannot be used again."""
    if guest.family != socket.AF_INET:
        return None
    return socket.socket(guest.family, guest.type, guest.proto, fileno=os.dup(guest.fileno()))
