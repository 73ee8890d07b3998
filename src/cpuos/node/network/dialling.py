"""Connecting a socket, in a process that can have no thread."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

__all__ = ["dial"]


async def dial(server: socket.socket, place: tuple[str, int]) -> None:
    """As `loop.sock_connect`, which may want a thread even for an address. Raises OSError."""
    number = server.connect_ex(place)
    if number == errno.EINPROGRESS:
        loop = asyncio.get_running_loop()
        writable = asyncio.Event()
        loop.add_writer(server.fileno(), writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(server.fileno())
        number = server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))
