"""Frames from an agent, sans-I/O: output comes in pieces as it arrives, so that no frame is ever held whole."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cpuos.gateway.agent.http import agent_invalid
from cpuos.types.frames import HEADER_BYTES, MAX_PAYLOAD, FrameKind

__all__ = ["MAX_JSON_FRAME", "FramePieces", "Piece"]

MAX_JSON_FRAME = 64 << 10
_HEADER = struct.Struct(">BBHIQ")
_OUTPUT = (FrameKind.STDOUT, FrameKind.STDERR)
_FROM_AGENT = frozenset(
    {*_OUTPUT, FrameKind.STARTED, FrameKind.ENDED, FrameKind.KEEPALIVE, FrameKind.EVENT, FrameKind.ERROR, FrameKind.ACK}
)

Piece = tuple[FrameKind, int, memoryview | bytes]
"""Kind, offset of the piece's first byte, bytes. An output frame can come as several pieces, others are whole."""


class FramePieces:
    """Feed what was read, take pieces out. Output pieces are views into what was fed: use them before feeding again."""

    def __init__(self) -> None:
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

    def feed(self, data: memoryview) -> Iterator[Piece]:
        position = 0
        end = len(data)
        while position < end:
            if not self._left:
                position = self._read_header(data, position)
                if self._header:
                    return
                if not self._left:
                    yield self._kind, self._offset, b""
                    continue
            taken = data[position : position + self._left]
            position += len(taken)
            self._left -= len(taken)
            if self._kind in _OUTPUT:
                yield self._kind, self._offset, taken
                self._offset += len(taken)
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
        if kind not in _FROM_AGENT or reserved_a or reserved_b:
            raise agent_invalid(f"frame of kind {kind} is out of contract")
        self._kind = FrameKind(kind)
        limit = MAX_PAYLOAD if self._kind in _OUTPUT else MAX_JSON_FRAME
        if length > limit or (self._kind is FrameKind.KEEPALIVE and length):
            raise agent_invalid(f"frame of kind {kind} with {length} bytes is over its limit")
        self._offset = offset
        self._left = length
        return position
