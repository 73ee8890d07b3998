"""Large bodies from socket to socket: one buffer, and no object, message or parser for each piece of them.

Both sockets belong to a transport of the event loop, which neither reads nor writes meanwhile; what is used here is a
duplicate of the descriptor. The heads, and bodies that are small or in chunks, go the ordinary way.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

__all__ = ["BULK_BYTES", "Buffer", "Carried", "Cut", "Hold", "Pipe", "Wire", "carry", "duplicate_of"]

BULK_BYTES = 1 << 20
"""From here on; below, the preparation is not worth it."""
PIECE_BYTES = 512 << 10
WAKE_BYTES = 256 << 10
SPLICE_NONBLOCK = 2
"""SPLICE_F_NONBLOCK, which this Python does not name."""


class Wire(Protocol):
    """The client's connection, for the body of the request or of the answer at hand (`cpuos.gateway.serve`)."""

    def lend_request(self) -> tuple[bytes, socket.socket]:
        """What has come of the body and was not given out, and a socket for the rest. Nobody else reads it now."""
        ...

    def return_request(self, left: int) -> None:
        """All but `left` bytes of the body were read."""
        ...

    async def lend_answer(self) -> socket.socket:
        """A socket for the rest of the answer's body, once all before it was sent."""
        ...

    def return_answer(self, sent: int) -> None: ...


class Cut(Exception):
    """One side ended before all was carried."""

    def __init__(self, *, source: bool, reason: str) -> None:
        super().__init__(reason)
        self.source = source
        """The side that was read; else the side that was written."""
        self.reason = reason


class Carried:
    """How much has gone over, also where the rest did not."""

    def __init__(self) -> None:
        self.read = 0
        self.written = 0


async def carry(
    source: socket.socket,
    target: socket.socket,
    count: int,
    *,
    hold: Hold,
    carried: Carried,
    give_up: asyncio.Future[Any],
    read_limit_s: float | None = None,
    write_limit_s: float | None = None,
) -> None:
    """Move `count` bytes, or fewer when `give_up` is done before. TimeoutError: one side did nothing for its time."""
    while carried.read < count and not give_up.done():
        most = min(PIECE_BYTES, count - carried.read)
        while (taken := _try(hold.take, source, most, is_source=True)) is None:
            await _ready(source, give_up, write=False, limit_s=read_limit_s)
            if give_up.done():
                return
        if not taken:
            raise Cut(source=True, reason="it ended early")
        carried.read += taken
        while carried.written < carried.read:
            sent = _try(hold.give, target, carried.read - carried.written, is_source=False)
            carried.written += sent or 0
            if sent is None:
                await _ready(target, give_up, write=True, limit_s=write_limit_s)
                if give_up.done():
                    return


def _try(move: Callable[[socket.socket, int], int], end: socket.socket, count: int, *, is_source: bool) -> int | None:
    """None: not now."""
    try:
        return move(end, count)
    except BlockingIOError:
        return None
    except OSError as error:
        raise Cut(source=is_source, reason=str(error)) from error


class Hold(Protocol):
    """Where bytes are between the two sockets."""

    def take(self, source: socket.socket, most: int) -> int: ...

    def give(self, target: socket.socket, count: int) -> int: ...


class Buffer:
    """Memory. For a source whose packets come one by one: it wakes only once many are there."""

    def __init__(self, source: socket.socket, count: int) -> None:
        self._bytes = memoryview(bytearray(min(PIECE_BYTES, count)))
        self._source = source
        self._left = count
        self._filled = 0

    def __enter__(self) -> Buffer:
        self._wake_at(WAKE_BYTES)
        return self

    def __exit__(self, *exc: object) -> None:
        self._source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def take(self, source: socket.socket, most: int) -> int:
        self._filled = source.recv_into(self._bytes[:most])
        self._left -= self._filled
        if self._left < WAKE_BYTES:
            self._wake_at(self._left)
        return self._filled

    def give(self, target: socket.socket, count: int) -> int:
        return target.send(self._bytes[self._filled - count : self._filled])

    def _wake_at(self, count: int) -> None:
        self._source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, min(count, self._left)))


class Pipe:
    """The kernel's own pages, which are not copied: half the work where they come in large pieces, as from a client."""

    def __init__(self) -> None:
        self._end, self._begin = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(PermissionError):  # this user has many already: then it is a small one
            fcntl.fcntl(self._begin, fcntl.F_SETPIPE_SZ, PIECE_BYTES)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._end)
        os.close(self._begin)

    def take(self, source: socket.socket, most: int) -> int:
        return os.splice(source.fileno(), self._begin, most, flags=SPLICE_NONBLOCK)

    def give(self, target: socket.socket, count: int) -> int:
        return os.splice(self._end, target.fileno(), count, flags=SPLICE_NONBLOCK)


async def _ready(end: socket.socket, give_up: asyncio.Future[Any], *, write: bool, limit_s: float | None) -> None:
    """Return when the socket can be used, or there is no more use."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def settle(_: object = None) -> None:
        if not ready.done():
            ready.set_result(None)

    def expire() -> None:
        if not ready.done():
            ready.set_exception(TimeoutError())

    number = end.fileno()
    (loop.add_writer if write else loop.add_reader)(number, settle)
    timer = None if limit_s is None else loop.call_later(limit_s, expire)
    give_up.add_done_callback(settle)
    try:
        await ready
    except TimeoutError:
        if write or not _holds_bytes(end):  # less than it wakes for came, and that counts
            raise
    finally:
        (loop.remove_writer if write else loop.remove_reader)(number)
        if timer is not None:
            timer.cancel()
        give_up.remove_done_callback(settle)


def _holds_bytes(source: socket.socket) -> bool:
    try:
        return bool(source.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def duplicate_of(transport: asyncio.BaseTransport) -> socket.socket:
    """A second descriptor of a transport's socket."""
    used = transport.get_extra_info("socket")
    twin = socket.socket(used.family, used.type, used.proto, fileno=os.dup(used.fileno()))
    twin.setblocking(False)
    return twin
