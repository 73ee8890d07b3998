"""Unconnected sockets made in one sandbox's router, a few ahead of need: making one takes a thread of the node."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable

__all__ = ["SocketStock"]

_LOW, _FILL, _MOST = 4, 16, 64
_WAIT_S = 5.0
_PAUSE_S = 0.2


class SocketStock:
    """`order` asks for so many, which then come in by `add`."""

    def __init__(self, order: Callable[[int], Awaitable[None]]) -> None:
        self._order = order
        self._sockets: deque[socket.socket] = deque()
        self._waiting: deque[asyncio.Future[socket.socket]] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, made: socket.socket) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(made)
                return
        if self._is_closed or len(self._sockets) >= _MOST:
            made.close()
        else:
            self._sockets.append(made)

    async def take(self) -> socket.socket:
        """The caller's from now on. Raises TimeoutError when none comes."""
        if self._sockets:
            taken = self._sockets.popleft()
            self.fill()
            return taken
        waiter: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self.fill()
        try:
            async with asyncio.timeout(_WAIT_S):
                return await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                self.add(waiter.result())
            waiter.cancel()
            raise

    def fill(self) -> None:
        """Order more, if few are left."""
        if self._filling is None and not self._is_closed and self._missing():
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    async def close(self) -> None:
        self._is_closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        for waiter in self._waiting:
            waiter.cancel()
        while self._sockets:
            self._sockets.popleft().close()

    def _missing(self) -> int:
        wanted = sum(not waiter.done() for waiter in self._waiting)
        if not wanted and len(self._sockets) >= _LOW:
            return 0
        return min(wanted + _FILL - len(self._sockets), _MOST)

    async def _fill(self) -> None:
        try:
            while count := self._missing():
                try:
                    await self._order(count)
                except Exception:  # the node is busy, or the sandbox is about to end: those who wait time out
                    await asyncio.sleep(_PAUSE_S)
                    if not any(not waiter.done() for waiter in self._waiting):
                        return
        finally:
            self._filling = None
