"""The frame format of command streams, the same on every hop: agent, gateway, client.

    0        1        2                4                8                                16
    +--------+--------+----------------+----------------+---------------------------------+
    |  kind  |   0    |       0        | payload length | offset of the payload's 1st byte |  big-endian
    +--------+--------+----------------+----------------+---------------------------------+

`api/guest.md` is the contract, `api/frames.json` the golden frames that every implementation is tested against.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["HEADER_BYTES", "MAX_PAYLOAD", "Frame", "FrameDecoder", "FrameError", "FrameKind", "encode_frame"]

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
