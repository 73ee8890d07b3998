"""Carries bytes both ways between two connected sockets, as they come, and counts them.

One thread for all connections: each turn copies what is there through one buffer that all share. It is large, since the
sender's window opens with what is taken at once. Only what a slow reader leaves stays behind, and where that is plenty,
smaller pieces are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable

from cpuos.node.network.peek.gate import Gate, Refused

__all__ = ["Allowance", "Buffer", "Relay", "Share", "reset"]

_LINGER_NOT = struct.pack("ii", 1, 0)
_SMALL_PIECE, _PIECE = 16 << 10, 1 << 20
# A peer that is gone without a word is noticed after about four minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 120), (socket.TCP_KEEPINTVL, 30), (socket.TCP_KEEPCNT, 4))


def reset(connection: socket.socket) -> None:
    """Close at once, so that the other side reads a reset, not an end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    connection.close()


class Buffer:
    """What all connections of a process share."""

    def __init__(self, *, plenty: int = 64 << 20) -> None:
        self.bytes = memoryview(bytearray(_PIECE))
        self.plenty = plenty
        self.held = 0
        """Bytes that wait for readers."""


class Share:
    """What all connections of one sandbox share of it."""

    def __init__(self, buffer: Buffer, *, plenty: int = 8 << 20) -> None:
        self._buffer, self._plenty, self._held = buffer, plenty, 0

    def room(self, *, small: bool) -> memoryview:
        """For one piece; while much is held, all are small."""
        is_much = self._held >= self._plenty or self._buffer.held >= self._buffer.plenty
        return self._buffer.bytes[:_SMALL_PIECE] if small or is_much else self._buffer.bytes

    def hold(self, more: int) -> None:
        self._held += more
        self._buffer.held += more


class Allowance:
    """How much of the process' time one sandbox may take with what has to be read: many small pieces cost as much as
    many large ones, and all sandboxes share one thread."""

    def __init__(self, *, share: float, most_s: float) -> None:
        self._share, self._most_s = share, most_s
        self._left_s, self._filled = most_s, time.monotonic()

    def spend(self, seconds: float) -> float:
        """How long to rest after that."""
        now = time.monotonic()
        self._left_s = min(self._most_s, self._left_s + (now - self._filled) * self._share) - seconds
        self._filled = now
        return max(0.0, -self._left_s / self._share)


class Relay:
    """Between a guest and a server. What the guest sends passes the gate, where there is one. Both sockets are the
    relay's."""

    def __init__(
        self,
        guest: socket.socket,
        server: socket.socket,
        *,
        share: Share,
        gate: Gate | None = None,
        allowance: Allowance | None = None,
        on_refused: Callable[[Refused], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate, self._on_refused = gate, on_refused
        self._guest, self._server = guest, server
        self._over = asyncio.Event()
        self._allowance = allowance
        up = None if gate is None or gate.is_transparent else self._pass_gate
        self._up = _Pump(self, guest, server, share=share, change=up)
        self._down = _Pump(self, server, guest, share=share, change=self._see_answer if self._is_holding else None)

    @property
    def sent(self) -> int:
        """Bytes that went from the guest to the server."""
        return self._up.carried

    @property
    def received(self) -> int:
        return self._down.carried

    async def run(self, first: bytes) -> None:
        """Send `first` to the server, then carry until both sides have ended."""
        for connection in (self._guest, self._server):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for option, value in _KEEPALIVE:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            self._up.start(is_paused=self._is_holding)
            self._down.start()
            if first:
                self._up.push(first)
            await self._over.wait()
        finally:
            self.break_off()
            self._guest.close()
            self._server.close()

    def break_off(self, refusal: Refused | None = None) -> None:
        """End it by resets, unless it has ended. What was refused is told before the guest can know."""
        if self._over.is_set():
            return
        if refusal is not None and self._on_refused is not None:
            self._on_refused(refusal)
        self._stop()
        for connection in (self._guest, self._server):
            reset(connection)
        self._over.set()

    def ended(self) -> None:
        """A direction has come to its end."""
        if self._up.is_over and self._down.is_over and not self._over.is_set():
            self._stop()
            self._over.set()

    def _stop(self) -> None:
        self._up.stop()
        self._down.stop()

    @property
    def _is_holding(self) -> bool:
        return self._gate is not None and self._gate.is_holding

    def _pass_gate(self, data: bytes) -> bytes:
        assert self._gate is not None
        assert self._allowance is not None
        begun = time.perf_counter()
        passed = self._gate.feed(data) if data else self._gate.end()
        if rest_s := self._allowance.spend(time.perf_counter() - begun):
            self._up.rest(rest_s)
        if self._gate.is_holding:
            self._up.pause()
            self._down.change = self._see_answer
        elif self._gate.is_transparent:
            self._up.change = None
        return passed

    def _see_answer(self, data: bytes) -> bytes:
        assert self._gate is not None
        if not data:
            return data
        waiting = self._gate.see_answer(data)
        if waiting is not None:
            self._down.change = None
            if self._gate.is_transparent:
                self._up.change = None
            if waiting:
                self._up.push(waiting)
            self._up.resume()
        return data


class _Pump:
    """One direction."""

    def __init__(
        self,
        relay: Relay,
        source: socket.socket,
        target: socket.socket,
        *,
        share: Share,
        change: Callable[[bytes], bytes] | None,
    ) -> None:
        self._relay, self._source, self._target, self._share = relay, source, target, share
        self._loop = asyncio.get_running_loop()
        self.change = change
        """What is done to the bytes on their way, b"" being the end; may raise Refused."""
        self.carried = 0
        self.is_over = False
        self._waiting = memoryview(b"")
        self._has_ended = self._is_paused = self._is_reading = False
        self._resting: asyncio.TimerHandle | None = None

    def start(self, *, is_paused: bool = False) -> None:
        self._is_paused = is_paused
        self._listen()

    def stop(self) -> None:
        self._loop.remove_reader(self._source.fileno())
        self._loop.remove_writer(self._target.fileno())
        self._is_reading = False
        if self._resting is not None:
            self._resting.cancel()
        self._hold(memoryview(b""))
        self._is_paused = self._has_ended = True

    def pause(self) -> None:
        self._is_paused = True
        self._listen()

    def resume(self) -> None:
        self._is_paused = False
        self._listen()

    def rest(self, seconds: float) -> None:
        """Read on only after so long."""
        if self._resting is not None:
            self._resting.cancel()
        self._resting = self._loop.call_later(seconds, self._rested)
        self._listen()

    def _rested(self) -> None:
        self._resting = None
        self._listen()

    def push(self, data: bytes) -> None:
        """Send this behind what waits."""
        if self._waiting:
            self._hold(memoryview(bytes(self._waiting) + data))
        else:
            self._send(data)

    def _listen(self) -> None:
        wanted = not (self._is_paused or self._resting or self._has_ended or self._waiting)
        if wanted and not self._is_reading:
            self._loop.add_reader(self._source.fileno(), self._read)
        elif self._is_reading and not wanted:
            self._loop.remove_reader(self._source.fileno())
        self._is_reading = wanted

    def _read(self) -> None:
        room = self._share.room(small=self.change is not None)
        try:
            count = self._source.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._relay.break_off()
            return
        try:
            data = room[:count] if self.change is None else self.change(bytes(room[:count]))
        except Refused as refusal:
            self._relay.break_off(refusal)
            return
        if data:
            self._send(data)
        if not count:
            self._has_ended = True
            self._listen()
            self._finish()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            sent = self._target.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._relay.break_off()
            return
        self.carried += sent
        if sent < len(data):
            self._hold(memoryview(bytes(data[sent:])))
            self._loop.add_writer(self._target.fileno(), self._write)
            self._listen()

    def _write(self) -> None:
        try:
            sent = self._target.send(self._waiting)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._relay.break_off()
            return
        self.carried += sent
        self._hold(self._waiting[sent:])
        if not self._waiting:
            self._loop.remove_writer(self._target.fileno())
            self._listen()
            if self._has_ended:
                self._finish()

    def _hold(self, data: memoryview) -> None:
        self._share.hold(len(data) - len(self._waiting))
        self._waiting = data

    def _finish(self) -> None:
        """The source has ended: so does what the target reads, once it has everything."""
        if self._waiting or self.is_over:
            return
        try:
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            self._relay.break_off()
            return
        self.is_over = True
        self._relay.ended()
