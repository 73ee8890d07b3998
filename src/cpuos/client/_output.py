"""Output of a program as it comes: whole lines for callbacks, and head and tail with exact counts for results."""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass

__all__ = ["HeadTail", "Kept", "LineSplitter", "decode_kept"]


class LineSplitter:
    """Bytes in any pieces to whole lines of text. Characters cut by a piece's end are kept together.

    Lines come without their "\\n" (a "\\r" stays), so `print` is a fitting callback. A line over `max_line` characters
    comes in parts: a program that never ends a line must not fill the memory.
    """

    def __init__(self, *, max_line: int = 1 << 20) -> None:
        self._undecoded = b""
        """The begin of a character."""
        self._rest: list[str] = []
        self._rest_size = 0
        self._max_line = max_line

    def feed(self, data: bytes) -> list[str]:
        return self._split(self._decode(data))

    def flush(self) -> list[str]:
        """The last line, when it has no end; also what stands before a gap."""
        lines = self._split(self._decode(b"", final=True))
        if self._rest_size:
            lines.append(self._take_rest())
        return lines

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        if self._undecoded:
            data = self._undecoded + data
        text, decoded = codecs.utf_8_decode(data, "replace", final)
        self._undecoded = data[decoded:]
        return text

    def _split(self, text: str) -> list[str]:
        lines = text.split("\n")
        last = lines.pop()
        if lines and self._rest_size:
            self._rest.append(lines[0])
            lines[0] = self._take_rest()
        if last:
            self._rest.append(last)
            self._rest_size += len(last)
            if self._rest_size >= self._max_line:
                lines.append(self._take_rest())
        return lines

    def _take_rest(self) -> str:
        line = "".join(self._rest)
        self._rest.clear()
        self._rest_size = 0
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Head and tail of one stream; `dropped` bytes stood between them."""

    head: bytes
    tail: bytes
    dropped: int


class HeadTail:
    """Keeps the first and the last half of `limit` bytes of a stream, and knows how many stood between."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._head_closed = False
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.offset = 0
        """Bytes of the stream so far, dropped ones included."""

    def feed(self, data: bytes) -> None:
        self.offset += len(data)
        if not self._head_closed:
            room = self._head_limit - len(self._head)
            if len(data) <= room:
                self._head += data
                return
            self._head += data[:room]
            data = data[room:]
            self._head_closed = True
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())
            if not self._tail:
                break

    def skip_to(self, offset: int) -> None:
        """The bytes from here to `offset` are gone: what follows is not next to what is kept."""
        if offset > self.offset:
            self.offset = offset
            self._head_closed = True
            self._tail.clear()
            self._tail_size = 0

    def kept(self) -> Kept:
        tail = b"".join(self._tail)
        tail = tail[max(len(tail) - self._tail_limit, 0) :]
        head = bytes(self._head)
        dropped = self.offset - len(head) - len(tail)
        if dropped:
            head, tail = _cut_at_characters(head, tail)
            dropped = self.offset - len(head) - len(tail)
        return Kept(head=head, tail=tail, dropped=dropped)


def decode_kept(kept: Kept) -> str:
    """Head and tail as text, one after the other."""
    if not kept.dropped:
        return (kept.head + kept.tail).decode("utf-8", "replace")
    return kept.head.decode("utf-8", "replace") + kept.tail.decode("utf-8", "replace")


def _cut_at_characters(head: bytes, tail: bytes) -> tuple[bytes, bytes]:
    """Take a character that the gap cut in two out of both ends, so that the kept text is the program's own."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(head[-4:])
    pending = len(decoder.getstate()[0])
    skip = 0
    while skip < min(3, len(tail)) and tail[skip] & 0xC0 == 0x80:
        skip += 1
    return head[: len(head) - pending], tail[skip:]
