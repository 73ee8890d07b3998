"""One byte stream with backpressure both ways: a visitor's connection, or a tunnel to a server inside."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["ByteStream"]

HELD_BYTES = 64 << 10
"""Received and not yet taken: beyond this the socket is not read, so that the sender waits."""
WRITE_HIGH_WATER = 64 << 10
SMALL_READ = 8 << 10
LARGE_READ = 64 << 10
"""One read, once data comes in bulk. All of these bound what one stream holds: a thousand may be open, all stalled."""


class ByteStream(asyncio.BufferedProtocol):
    """For one reader and one writer. An end that is no clean one reads as `ConnectionResetError`."""

    def __init__(self, *, half_open: bool = True, when_lost: Callable[[], None] | None = None) -> None:
        self._half_open = half_open
        """Goes on sending after the other side's end; TLS cannot."""
        self._when_lost = when_lost
        self.when_ended: Callable[[], None] | None = None
        """Called when the other side ends or is lost, once; set while nobody reads and the end matters."""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(SMALL_READ)
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._reading_paused = False
        self._writing_paused = False
        self._ended = False
        self._lost = False
        self._reset = False
        self._reader: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)  # not the array: TLS reads into slices of it

    def buffer_updated(self, nbytes: int) -> None:
        self._pieces.append(bytes(memoryview(self._buffer)[:nbytes]))
        self._held += nbytes
        if nbytes == len(self._buffer) < LARGE_READ:
            self._buffer = bytearray(LARGE_READ)
        if self._held >= HELD_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> bool:
        self._ended = True
        self._wake(self._reader)
        self._tell_end()
        return self._half_open

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._reset = self._reset or error is not None or not self._ended
        self._wake(self._reader)
        self._wake(self._drained)
        self._tell_end()
        if self._when_lost is not None:
            self._when_lost()
            self._when_lost = None

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._wake(self._drained)

    # reading

    @property
    def lost(self) -> bool:
        """Nothing can be sent any more."""
        return self._lost or self._transport is None or self._transport.is_closing()

    @property
    def ended(self) -> bool:
        """The other side has said that nothing more follows, or is gone."""
        return self._ended or self.lost

    @property
    def idle(self) -> bool:
        """Open, and nothing has come that was not taken."""
        return not (self.lost or self._ended or self._pieces)

    @property
    def peer_address(self) -> str:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if isinstance(peer, tuple) else ""

    async def read(self) -> bytes:
        """What has come, as it came; empty at the other side's end."""
        while not self._pieces:
            if self._reset:
                raise ConnectionResetError("the connection was reset")
            if self._ended or self._lost:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        piece = self._pieces.popleft()
        self._held -= len(piece)
        if self._reading_paused and self._held < HELD_BYTES // 2 and not self.lost:
            self._reading_paused = False
            self._transport.resume_reading()
        return piece

    def unread(self, data: bytes) -> None:
        """Give bytes back that belong to what follows."""
        if data:
            self._pieces.appendleft(data)
            self._held += len(data)

    # writing

    def write(self, data: bytes) -> None:
        if data and not self.lost:
            self._transport.write(data)

    def write_pieces(self, pieces: Sequence[bytes]) -> None:
        if pieces and not self.lost:
            self._transport.writelines(pieces)

    async def drain(self) -> None:
        """Wait until the socket takes more; a lost connection raises."""
        if self.lost:
            raise ConnectionResetError("the connection is gone")
        if not self._writing_paused:
            return
        self._drained = asyncio.get_running_loop().create_future()
        try:
            await self._drained
        finally:
            self._drained = None
        if self._lost:
            raise ConnectionResetError("the connection is gone")

    def write_end(self) -> None:
        """Say that nothing more follows; reading goes on."""
        if self.lost:
            return
        if self._half_open and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def close(self) -> None:
        """End when what was written is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End now; what was not sent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    # inner

    def _tell_end(self) -> None:
        told, self.when_ended = self.when_ended, None
        if told is not None:
            told()

    @staticmethod
    def _wake(future: asyncio.Future[None] | None) -> None:
        if future is not None and not future.done():
            future.set_result(None)
