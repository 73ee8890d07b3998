"""Recorded output: for each stream a file that holds its head as it came and, behind it, a ring with the newest bytes.

The file grows as output comes and never beyond head + ring. Once the ring may wrap, a side file of three numbers says
where it stands; until then the file's size says it. Each write is a plain write(2) into the page cache: what was
written survives the death of this process, and the agent is told only afterwards that it may forget.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from cpuos.errors import OutputLost

__all__ = ["RING_SLACK", "SpoolLimits", "StreamFile"]

RING_SLACK = 1 << 20
"""Ring bytes beyond the promised tail: a write that is cut short by a crash may only spoil these."""
SMALLEST_RING = 1 << 20
_SIDE = struct.Struct(">QQQ")


@dataclass(frozen=True, kw_only=True)
class SpoolLimits:
    """Bytes kept of each stream, and of all streams of one sandbox."""

    head_bytes: int = 128 << 20
    tail_bytes: int = 128 << 20
    sandbox_bytes: int = 1 << 30
    ended_bytes: int = 8 << 30
    """Of all ended sandboxes together."""
    records: int = 1000
    """Ended commands that a sandbox's list goes back."""


class StreamFile:
    """One stream's record. Offsets count the bytes that the program wrote, from 0."""

    def __init__(self, path: str | Path, *, limits: SpoolLimits, fresh: bool = False) -> None:
        """`fresh`: nothing is there yet, so nothing is looked up."""
        self._path = path
        self._side_path = f"{path}.ring"
        self._descriptor: int | None = None
        self._side: int | None = None
        self._removed = False
        self._head = limits.head_bytes
        self._tail = limits.tail_bytes
        self.total = 0
        if not fresh:
            self._load()

    def _load(self) -> None:
        try:
            self._head, self._tail, self.total = _SIDE.unpack(Path(self._side_path).read_bytes())
        except FileNotFoundError:
            try:
                self.total = os.stat(self._path).st_size
            except FileNotFoundError:
                return
            self._head = max(self._head, self.total)

    # writing

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises OSError when the disk is full; then nothing of `data` counts and it can be tried again."""
        view = memoryview(data)
        position = 0
        while position < len(view):
            piece = view[position : position + RING_SLACK]
            if self.total < self._head:
                piece = piece[: self._head - self.total]
            self._write_piece(piece)
            position += len(piece)

    def _write_piece(self, piece: memoryview) -> None:
        descriptor = self._opened()
        offset = self.total
        length = len(piece)
        written = 0
        while written < length:
            place, room = self._place(offset + written)
            written += os.pwrite(descriptor, piece[written : written + room], place)
        self.total = offset + length
        if self.total > self._head:
            self._save_side()

    def freeze(self) -> None:
        """Grow no more: what is here becomes the head, or the ring's size. For a sandbox over its budget."""
        if self.total <= self._head:
            self._head = self.total
            self._tail = min(self._tail, SMALLEST_RING)
        elif self.total - self._head <= self._tail:
            self._tail = max(self.total - self._head - RING_SLACK, min(self._tail, SMALLEST_RING))
        self._save_side()

    def close(self) -> None:
        for descriptor in (self._descriptor, self._side):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptor = self._side = None

    def remove(self, *, total: int) -> None:
        """Drop the recorded bytes; the count stays."""
        self.close()
        self.total = total
        self._removed = True
        for path in (self._path, self._side_path):
            Path(path).unlink(missing_ok=True)

    # reading

    @property
    def gap(self) -> tuple[int, int] | None:
        """The dropped range, from and to; None while all is here."""
        if self._removed:
            return (0, self.total) if self.total else None
        first_kept = self.total - self._tail
        return (self._head, first_kept) if first_kept > self._head else None

    @property
    def dropped(self) -> int:
        gap = self.gap
        return gap[1] - gap[0] if gap else 0

    @property
    def stored(self) -> int:
        """Bytes on the disk."""
        return 0 if self._removed else min(self.total, self._head + self._tail + RING_SLACK)

    def endangers(self, position: int) -> bool:
        """Much more output would overwrite what a reader at `position` has not read."""
        return not self._removed and max(position, self._head) + self._tail // 2 < self.total

    def read(self, offset: int, limit: int) -> bytes:
        """Bytes from `offset`, not in the gap; fewer than `limit` at the end, the gap or the turn of the ring."""
        buffer = bytearray(max(0, min(limit, self.total - offset)))
        count = self.read_into(memoryview(buffer), offset)
        return bytes(memoryview(buffer)[:count])

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` as far as one read can; the count of bytes."""
        gap = self.gap
        room = min(len(buffer), self.total - offset)
        if gap and offset < gap[1]:
            if offset >= gap[0]:
                raise self._lost(offset)
            room = min(room, gap[0] - offset)
        if room <= 0:
            return 0
        place, contiguous = self._place(offset)
        room = min(room, contiguous)
        try:
            count = os.preadv(self._opened(), [buffer[:room]], place)
        except OSError as error:
            raise self._lost(offset) from error
        if count < room:
            raise self._lost(offset)
        return count

    # inner

    def _place(self, offset: int) -> tuple[int, int]:
        """Where in the file the byte at `offset` lies, and how many follow it there."""
        if offset < self._head:
            return offset, self._head - offset
        ring = self._tail + RING_SLACK
        position = (offset - self._head) % ring
        return self._head + position, ring - position

    def _opened(self) -> int:
        if self._descriptor is None:
            if self._removed:
                raise self._lost(0)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._descriptor

    def _save_side(self) -> None:
        if self._side is None:
            self._side = os.open(self._side_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._side, _SIDE.pack(self._head, self._tail, self.total), 0)

    def _lost(self, offset: int) -> OutputLost:
        return OutputLost(
            f"cannot read recorded output at {offset}",
            f"the record of {os.path.basename(self._path)} does not hold it any more",
            hint="read the full copy inside the sandbox (output_path of the command), if it has one",
            details={"offset": offset, "gap": list(self.gap or ())},
        )
