"""From a command's record to one client: frames from the client's offsets on, until ENDED.

Every byte comes out of the record, which a moment after its arrival is page cache: a client that lags costs one
buffer, never more. Both streams get their turn in every batch.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable

from cpuos.errors import InvalidRequest
from cpuos.gateway.records import STREAMS, RecordedCommand, StreamName
from cpuos.types.frames import HEADER_BYTES, FrameKind, encode_frame

__all__ = ["KEEPALIVE", "Follower"]

_HEADER = struct.Struct(">BBHIQ")
_KINDS = {"stdout": FrameKind.STDOUT, "stderr": FrameKind.STDERR}
SMALL_BATCH = 16 << 10
LARGE_BATCH = 256 << 10
ACTIVE_S = 5.0
"""A client that took nothing for so long holds no output back."""
KEEPALIVE = encode_frame(FrameKind.KEEPALIVE)


class Follower:
    """`take` gives what can be sent now; `finished` is set once ENDED was given."""

    def __init__(
        self,
        recorded: RecordedCommand,
        *,
        stdout: int = 0,
        stderr: int = 0,
        tail: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorded = recorded
        self._positions: dict[StreamName, int] = {"stdout": stdout, "stderr": stderr}
        self._tail = tail
        self._clock = clock
        self._moved_at = clock()
        self._started = False
        self._ended_json = b""
        self._buffer = bytearray(SMALL_BATCH)
        self._filled = 0
        self.finished = False
        if recorded.ended:
            for name, position in self._positions.items():
                if position > recorded.streams[name].total:
                    raise InvalidRequest(
                        f"cannot stream {name} from {position}",
                        f"the program wrote {recorded.streams[name].total} bytes",
                    )
        recorded.users += 1
        recorded.followers.add(self)

    def close(self) -> None:
        self._recorded.followers.discard(self)
        self._recorded.release()

    def holds_back(self) -> bool:
        """Its client reads, and more output would overwrite what it has not got."""
        if self._tail is not None or self._clock() - self._moved_at > ACTIVE_S:
            return False
        return any(self._recorded.streams[name].endangers(self._positions[name]) for name in STREAMS)

    def take(self) -> memoryview:
        """The next batch of whole frames; empty when there is nothing new. Valid until the next call."""
        if self._filled == LARGE_BATCH or (self._filled > len(self._buffer) // 2 and len(self._buffer) == SMALL_BATCH):
            self._buffer = bytearray(LARGE_BATCH)
        self._filled = 0
        if not self._started:
            self._started = True
            self._put(FrameKind.STARTED, self._command_json())
        if self._positions["stderr"] < self._recorded.streams["stderr"].total:
            # Stdout may fill half, stderr the rest; what stderr leaves over is stdout's again.
            self._put_output("stdout", until=len(self._buffer) // 2)
            self._put_output("stderr", until=len(self._buffer))
        self._put_output("stdout", until=len(self._buffer))
        if self._recorded.ended and not self.finished and self._all_given():
            self._put(FrameKind.ENDED, self._command_json())
            self.finished = True
        if self._filled:
            self._moved_at = self._clock()
        return memoryview(self._buffer)[: self._filled]

    def _all_given(self) -> bool:
        return all(self._positions[name] >= self._recorded.streams[name].total for name in STREAMS)

    def _put_output(self, name: StreamName, *, until: int) -> None:
        stream = self._recorded.streams[name]
        while True:
            self._skip_dropped(name)
            position = self._positions[name]
            end = self._send_until(name)
            room = min(until - self._filled - HEADER_BYTES, end - position)
            if room <= 0:
                return
            start = self._filled + HEADER_BYTES
            view = memoryview(self._buffer)
            count = stream.read_into(view[start : start + room], position)
            view.release()
            if not count:
                return
            _HEADER.pack_into(self._buffer, self._filled, _KINDS[name], 0, 0, count, position)
            self._filled = start + count
            self._positions[name] = position + count

    def _send_until(self, name: StreamName) -> int:
        total = self._recorded.streams[name].total
        if self._tail is None or (self._recorded.ended and self._positions[name] >= self._tail):
            return total
        return min(total, self._tail)

    def _skip_dropped(self, name: StreamName) -> None:
        """Pass over what the record dropped, and over the middle that a client of head and tail does not want."""
        stream = self._recorded.streams[name]
        position = target = self._positions[name]
        if self._tail is not None and self._recorded.ended and position >= self._tail:
            target = max(target, stream.total - self._tail)
        gap = stream.gap
        if gap and gap[0] <= target < gap[1]:
            target = gap[1]
        if target > position:
            payload = json.dumps({"stream": name, "from": position, "to": target}).encode()
            self._put(FrameKind.GAP, payload)
            self._positions[name] = target

    def _command_json(self) -> bytes:
        told = self._ended_json or b'{"command":' + self._recorded.command().model_dump_json().encode() + b"}"
        if self._recorded.ended:
            self._ended_json = told  # for the last frame, where the first one tells of the end already
        return told

    def _put(self, kind: FrameKind, payload: bytes) -> None:
        frame = encode_frame(kind, payload)
        end = self._filled + len(frame)
        if end > len(self._buffer):
            self._buffer = self._buffer + bytearray(end - len(self._buffer))  # a new one: the old may be lent out
        self._buffer[self._filled : end] = frame
        self._filled = end
