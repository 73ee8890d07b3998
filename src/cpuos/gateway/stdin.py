"""Bytes on their way to a program's stdin: what the agent has not taken is held, so that a cut loses none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cpuos.errors import Conflict
from cpuos.types.frames import FrameKind, encode_frame

__all__ = ["StdinPipe"]

WINDOW_BYTES = 256 << 10
"""Held and not yet taken; the agent can hold as much, so that stdin never stands before an ACK."""
PIECE_BYTES = 64 << 10


class StdinPipe:
    """Sans-I/O: `write` sends a frame to the agent, when there is a connection; `notify` tells waiters of a change."""

    def __init__(self, *, write: Callable[[bytes], None], notify: Callable[[], None]) -> None:
        self._write = write
        self._notify = notify
        self._held: deque[tuple[int, bytes]] = deque()
        self._acknowledged = True
        self.known = False
        """The agent has told how much it took: after a restart of ours nobody else knows."""
        self.accepted = 0
        """Bytes taken from clients."""
        self.taken = 0
        """Bytes that the agent has taken."""
        self.closed_at: int | None = None
        """Total length, once the client said that no more comes."""

    @property
    def room(self) -> int:
        return WINDOW_BYTES - (self.accepted - self.taken)

    def new_bytes(self, data: bytes, offset: int) -> bytes:
        """What of `data` was not accepted before; a hole between is refused."""
        if offset > self.accepted:
            raise Conflict(
                f"cannot take stdin at {offset}",
                f"it continues at {self.accepted}",
                details={"offset": self.accepted},
            )
        return data[self.accepted - offset :]

    def accept(self, data: bytes) -> int:
        """Take a first piece of `data` that fits, and send it; how much that was."""
        if self.closed_at is not None:
            raise Conflict("cannot take stdin", f"it was closed after {self.closed_at} bytes")
        piece = bytes(data[: min(self.room, PIECE_BYTES)])
        if piece:
            self._held.append((self.accepted, piece))
            self._write(encode_frame(FrameKind.STDIN, piece, offset=self.accepted))
            self.accepted += len(piece)
            if not self._acknowledged:
                self.acknowledge(self.accepted)
        return len(piece)

    def close(self) -> None:
        """No more comes."""
        if self.closed_at is None:
            self.closed_at = self.accepted
            self._write(encode_frame(FrameKind.STDIN_END, offset=self.closed_at))

    def acknowledge(self, taken: int) -> None:
        """The agent has taken all before this offset. A number that cannot be is ignored: it is only a guest's word."""
        if not self.taken < taken <= self.accepted:
            return
        self.taken = taken
        while self._held and self._held[0][0] + len(self._held[0][1]) <= taken:
            self._held.popleft()
        self._notify()

    def connected(self, taken: int | None) -> None:
        """A stream to the agent stands again: send what it may have missed. None: this agent acknowledges nothing."""
        self._acknowledged = taken is not None
        self.known = True
        if taken is not None and not self.accepted:
            self.accepted = self.taken = taken  # after a restart of ours the agent knows better
        elif taken is not None:
            self.acknowledge(taken)
        for offset, piece in self._held:
            self._write(encode_frame(FrameKind.STDIN, piece, offset=offset))
        if self.closed_at is not None:
            self._write(encode_frame(FrameKind.STDIN_END, offset=self.closed_at))
