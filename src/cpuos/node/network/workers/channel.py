"""Packets between the node and one of its workers: JSON objects with descriptors, over a SOCK_SEQPACKET pair.

Neither side trusts the other with its memory or its time: sizes, counts and queues have limits, and whoever passes one
has broken the channel (`Breach`), which ends it.
"""

from __future__ import annotations

import array
import asyncio
import errno
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

__all__ = ["MAX_DESCRIPTORS", "MAX_MESSAGE_BYTES", "Breach", "Channel", "Descriptors", "Message", "channel_pair"]

MAX_MESSAGE_BYTES = 1 << 20
"""A policy with every list full is about 300 KiB."""
MAX_DESCRIPTORS = 64
"""In one message; the kernel's own limit is 253."""

_PACKET_BYTES = 60 << 10  # fits the default socket buffers several times
_MORE, _LAST = b"+", b"."  # how a packet begins: its message goes on in the next one, or ends here
_MAX_QUEUED_BYTES = 8 << 20
_BATCH = 32  # packets read before other work of the loop has its turn
_PAUSE_S = 0.02


class Breach(Exception):
    """The other side did what the channel does not allow."""


class Message(BaseModel):
    """What crosses the channel."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    op: ClassVar[str] = ""
    """What is asked for; answers have none."""


class Descriptors:
    """Descriptors that came with a message; those that nobody takes are closed."""

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self._numbers = deque(numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self) -> int:
        """The next one, which is the caller's now."""
        if not self._numbers:
            raise Breach("a message came with too few descriptors")
        return self._numbers.popleft()

    def take_socket(self) -> socket.socket:
        """The next one as a non-blocking socket."""
        number = self.take()
        try:
            taken = socket.socket(fileno=number)
        except OSError as problem:
            os.close(number)
            raise Breach(f"a descriptor is no socket: {problem}") from None
        taken.setblocking(False)
        return taken

    def close(self) -> None:
        while self._numbers:
            os.close(self._numbers.popleft())


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """The node's end and the worker's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. `on_message` gets each whole message and must close its descriptors; `on_end` is called once, with what
    went wrong, or None when the other side went away. With `max_descriptors` 0 the kernel itself drops all of them."""

    def __init__(
        self,
        end: socket.socket,
        *,
        on_message: Callable[[dict[str, Any], Descriptors], None],
        on_end: Callable[[Breach | OSError | None], None],
        max_descriptors: int = 0,
        messages_per_s: int | None = None,
    ) -> None:
        self._socket = end
        self._on_message, self._on_end = on_message, on_end
        self._max_descriptors = max_descriptors
        self._rate, self._tokens = messages_per_s, float(messages_per_s or 0)
        self._loop = asyncio.get_running_loop()
        self._filled = self._loop.time()
        self._parts = bytearray()
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._queued_bytes = 0
        self._pause: asyncio.TimerHandle | None = None
        self.closed = False
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sent or queued when it returns; the descriptors stay the caller's. After the end it does nothing."""
        if self.closed:
            return
        body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
        if len(body) > MAX_MESSAGE_BYTES or len(descriptors) > MAX_DESCRIPTORS:
            raise Breach(f"a message of {len(body)} bytes and {len(descriptors)} descriptors is too large to send")
        for start in range(0, len(body), _PACKET_BYTES):
            is_last = start + _PACKET_BYTES >= len(body)
            packet = (_LAST if is_last else _MORE) + body[start : start + _PACKET_BYTES]
            self._send_packet(packet, list(descriptors) if is_last else [])

    def close(self) -> None:
        """Tell nobody; may be repeated."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        if self._pause is not None:
            self._pause.cancel()
        for _, held in self._outgoing:
            _close_all(held)
        self._outgoing.clear()
        self._socket.close()

    def _end(self, problem: Breach | OSError | None) -> None:
        if not self.closed:
            self.close()
            self._on_end(problem)

    def _send_packet(self, packet: bytes, descriptors: list[int]) -> None:
        if not self._outgoing and self._try_send(packet, descriptors):
            return
        if self.closed:
            return
        if self._queued_bytes + len(packet) > _MAX_QUEUED_BYTES:
            # Not within the caller's call: it is in the middle of something else.
            self._loop.call_soon(self._end, Breach("the other side does not read"))
            return
        if not self._outgoing:
            self._loop.add_writer(self._socket.fileno(), self._write)
        # The caller closes its own as soon as this returns.
        self._outgoing.append((packet, [os.dup(number) for number in descriptors]))
        self._queued_bytes += len(packet)

    def _try_send(self, packet: bytes, descriptors: list[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._socket.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as problem:
            if problem.errno in _BUSY:
                return False
            self._loop.call_soon(self._end, problem)
        return True

    def _write(self) -> None:
        while self._outgoing:
            packet, held = self._outgoing[0]
            if not self._try_send(packet, held):
                return
            if self.closed:
                return
            self._outgoing.popleft()
            self._queued_bytes -= len(packet)
            _close_all(held)
        self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        for _ in range(_BATCH):
            if not self._may_read():
                return
            try:
                packet, descriptors = self._receive()
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, Breach) as problem:
                self._end(problem)
                return
            if not packet:
                descriptors.close()
                self._end(None)
                return
            self._take(packet, descriptors)
            if self.closed:
                return

    def _may_read(self) -> bool:
        """Whether the rate allows another packet now; if not, reading goes on a moment later."""
        if self._rate is None:
            return True
        now = self._loop.time()
        self._tokens = min(float(self._rate), self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        if self._tokens >= 1:
            self._tokens -= 1
            return True
        self._loop.remove_reader(self._socket.fileno())
        self._pause = self._loop.call_later(_PAUSE_S, self._resume)
        return False

    def _resume(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._read)

    def _receive(self) -> tuple[bytes, Descriptors]:
        room = socket.CMSG_LEN(self._max_descriptors * 4) if self._max_descriptors else 0
        packet, ancillary, flags, _ = self._socket.recvmsg(_PACKET_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
        numbers = array.array("i")
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
        descriptors = Descriptors(numbers)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            descriptors.close()
            raise Breach("a packet is too long" if flags & socket.MSG_TRUNC else "a packet has too many descriptors")
        return packet, descriptors

    def _take(self, packet: bytes, descriptors: Descriptors) -> None:
        try:
            message = self._join(packet, len(descriptors))
        except Breach as problem:
            descriptors.close()
            self._end(problem)
            return
        if message is not None:
            self._on_message(message, descriptors)

    def _join(self, packet: bytes, descriptors: int) -> dict[str, Any] | None:
        """The whole message, once its last packet is there."""
        if packet[:1] not in (_MORE, _LAST) or (packet[:1] == _MORE and descriptors):
            raise Breach("a packet does not begin as one")
        self._parts += packet[1:]
        if len(self._parts) > MAX_MESSAGE_BYTES:
            raise Breach("a message is too long")
        if packet[:1] == _MORE:
            return None
        body, self._parts = bytes(self._parts), bytearray()
        try:
            message = from_json(body, allow_inf_nan=False)
        except ValueError as problem:
            raise Breach(f"a message is no JSON: {problem}") from None
        if not isinstance(message, dict):
            raise Breach("a message is no object")
        return message


# What passes: memory is short, or too many descriptors are on their way.
_BUSY = {errno.ENOBUFS, errno.ETOOMANYREFS}


def _close_all(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)
