"""The frame format of command streams, the same on every hop: agent, gateway, client.

    0        1        2                4                8                                16
    +--------+--------+----------------+----------------+---------------------------------+
    |  kind  |   0    |       0        | payload length | offset of the payload's 1st byte |  big-endian
    +--------+--------+----------------+----------------+---------------------------------+

`api/guest.md` is the contract, `api/frames.json` the golden frames that every implementation is tested against.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "HEADER_BYTES",
    "MAX_PAYLOAD",
    "Frame",
    "FrameDecoder",
    "FrameError",
    "FrameKind",
    "FramePieces",
    "Piece",
    "encode_frame",
]

_HEADER = struct.Struct(">BBHIQ")
HEADER_BYTES = _HEADER.size
MAX_PAYLOAD = 1 << 20


class FrameKind(IntEnum):
    STDOUT = 1  # offset: position in the program's stdout (a pty's only stream)
    STDERR = 2
    STARTED = 3  # JSON, first frame of every stream
    ENDED = 4  # JSON, last frame of every stream
    GAP = 5  # JSON {"stream", "from", "to"}: these bytes were dropped
    KEEPALIVE = 6  # empty
    EVENT = 7  # JSON, one file event (watch)
    ERROR = 8  # JSON, an error body; last frame
    STDIN = 16  # towards the program; offset: position in its stdin
    STDIN_END = 17  # no more stdin; offset: its total length
    ACK = 18  # offset: bytes of stdout held durably; JSON {"stdout": n, "stderr": n}
    RESIZE = 19  # JSON {"cols", "rows"}
    KILL = 20  # JSON {"signal", "reason"}: the whole process tree


class FrameError(ValueError):
    """The bytes are not frames of this contract."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    offset: int
    payload: bytes


def encode_frame(kind: FrameKind, payload: bytes | bytearray | memoryview = b"", *, offset: int = 0) -> bytes:
    return _HEADER.pack(kind, 0, 0, len(payload), offset) + payload


class FrameDecoder:
    """Feed bytes in any pieces, take whole frames out. Raises FrameError at the first byte out of contract."""

    def __init__(self, *, max_payload: int = MAX_PAYLOAD) -> None:
        self._buffer = bytearray()
        self._max_payload = max_payload

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        self._buffer += data
        position = 0
        frames = []
        while len(self._buffer) - position >= HEADER_BYTES:
            kind, reserved_a, reserved_b, length, offset = _HEADER.unpack_from(self._buffer, position)
            if reserved_a or reserved_b or length > self._max_payload:
                raise FrameError(f"cannot read frame: header kind={kind} length={length} is out of contract")
            try:
                frame_kind = FrameKind(kind)
            except ValueError:
                raise FrameError(f"cannot read frame: kind {kind} is unknown") from None
            end = position + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            frames.append(Frame(frame_kind, offset, bytes(memoryview(self._buffer)[position + HEADER_BYTES : end])))
            position = end
        del self._buffer[:position]
        return iter(frames)

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame; not 0 at the end of a stream means that it was cut."""
        return len(self._buffer)


Piece = tuple[FrameKind, int, memoryview | bytes]
"""Kind, offset of the piece's first byte, bytes. An output frame can come as several pieces, others are whole."""
_OUTPUT = (FrameKind.STDOUT, FrameKind.STDERR)


class FramePieces:
    """Feed what was read, take pieces out: output as it comes, so that no frame of it is ever held whole.

    Output pieces are views into what was fed.
    """

    def __init__(
        self,
        *,
        kinds: frozenset[FrameKind] = frozenset(FrameKind),
        max_json: int = MAX_PAYLOAD,
        refuse: Callable[[str], Exception] = FrameError,
    ) -> None:
        """`kinds` and `max_json` are what the other side may send; `refuse` makes the error for all else."""
        self._kinds = kinds
        self._max_json = max_json
        self._refuse = refuse
        self._header = b""
        self._kind = FrameKind.KEEPALIVE
        self._offset = 0
        self._left = 0
        """Bytes still to come of the frame at hand."""
        self._json = bytearray()

    @property
    def whole(self) -> bool:
        """At the end of a stream: it ended between two frames."""
        return not self._left and not self._header

    def feed(self, data: bytes | memoryview) -> Iterator[Piece]:
        view = memoryview(data)
        position = 0
        end = len(view)
        while position < end:
            if not self._left:
                position = self._read_header(view, position)
                if self._header:
                    return
                if not self._left:
                    yield self._kind, self._offset, b""
                    continue
            taken = view[position : position + self._left]
            position += len(taken)
            self._left -= len(taken)
            if self._kind in _OUTPUT:
                offset = self._offset
                self._offset += len(taken)
                yield self._kind, offset, taken
            else:
                self._json += taken
                if not self._left:
                    payload = bytes(self._json)
                    self._json.clear()
                    yield self._kind, self._offset, payload

    def _read_header(self, data: memoryview, position: int) -> int:
        held = len(self._header)
        header = self._header + bytes(data[position : position + HEADER_BYTES - held])
        position += len(header) - held
        if len(header) < HEADER_BYTES:
            self._header = header
            return position
        self._header = b""
        kind, reserved_a, reserved_b, length, offset = _HEADER.unpack(header)
        if kind not in self._kinds or reserved_a or reserved_b:
            raise self._refuse(f"frame of kind {kind} is out of contract")
        self._kind = FrameKind(kind)
        limit = MAX_PAYLOAD if self._kind in _OUTPUT else self._max_json
        if length > limit or (self._kind is FrameKind.KEEPALIVE and length):
            raise self._refuse(f"frame of kind {kind} with {length} bytes is over its limit")
        self._offset = offset
        self._left = length
        return position
