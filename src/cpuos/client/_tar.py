"""Reading a tar stream that a hostile sandbox may have made: bounded headers, a closed set of kinds, no seeking.

The standard library's reader takes headers of any size into memory and knows more kinds than a tree of files needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cpuos.client._http import TransportFailure
from cpuos.errors import AgentFailure

__all__ = ["TarEntry", "TarKind", "read_tar"]

BLOCK = 512
# Of one entry, in however many headers: the longest path of Linux with room for other records.
MAX_EXTENDED = 64 << 10


class TarKind(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class TarEntry:
    name: bytes
    kind: TarKind
    mode: int
    size: int
    modified_at: float
    link: bytes = b""


_KINDS = {b"0": TarKind.FILE, b"\0": TarKind.FILE, b"5": TarKind.DIRECTORY, b"2": TarKind.SYMLINK}


class _Source:
    """The stream as exact pieces."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def exactly(self, size: int) -> bytes:
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        while size:
            if not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    raise TransportFailure("the folder's stream ended before its end mark", sent=True)
                self._rest = memoryview(chunk)
                continue
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            yield piece

    def drain(self) -> None:
        for _ in self._chunks:
            pass


def read_tar(chunks: Iterator[bytes]) -> Iterator[tuple[TarEntry, Iterator[memoryview]]]:
    """Entries with their content, which is skipped where it was not read."""
    source = _Source(chunks)
    extended: dict[bytes, bytes] = {}
    taken = 0
    while True:
        header = source.exactly(BLOCK)
        if header == bytes(BLOCK):
            source.drain()
            return
        entry, flag = _parse_header(header)
        if flag in (b"x", b"g", b"L", b"K"):
            taken += BLOCK + entry.size
            if taken > MAX_EXTENDED:
                raise _invalid(f"extended headers of over {MAX_EXTENDED} bytes for one entry")
            data = source.exactly(entry.size)
            source.exactly(-entry.size % BLOCK)
            if flag == b"x":
                extended.update(_parse_records(data))
            elif flag == b"L":
                extended[b"path"] = data.rstrip(b"\0")
            elif flag == b"K":
                extended[b"linkpath"] = data.rstrip(b"\0")
            continue
        entry = _extend(entry, extended)
        extended, taken = {}, 0
        content = source.pieces(entry.size)
        yield entry, content
        for _ in content:
            pass
        source.exactly(-entry.size % BLOCK)


def _parse_header(header: bytes) -> tuple[TarEntry, bytes]:
    stored = _number(header[148:156])
    if stored != sum(header[:148]) + sum(header[156:]) + 8 * 0x20:
        raise _invalid("a header with a wrong checksum")
    flag = header[156:157]
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    kind = _KINDS.get(flag, TarKind.OTHER)
    # Only files have content; other kinds may state a size that is not there.
    size = _number(header[124:136]) if kind is TarKind.FILE or kind is TarKind.OTHER else 0
    return (
        TarEntry(
            name=prefix + b"/" + name if prefix else name,
            kind=kind,
            mode=_number(header[100:108]),
            size=size,
            modified_at=_number(header[136:148]),
            link=header[157:257].split(b"\0", 1)[0],
        ),
        flag,
    )


def _extend(entry: TarEntry, records: dict[bytes, bytes]) -> TarEntry:
    if not records:
        return entry
    if any(key.startswith(b"GNU.sparse.") for key in records):
        raise _invalid("a sparse file")
    try:
        size = int(records.get(b"size", entry.size))
        modified_at = float(records.get(b"mtime", entry.modified_at))
    except ValueError:
        raise _invalid("an extended header with a bad number") from None
    if size < 0:
        raise _invalid("a negative size")
    return TarEntry(
        name=records.get(b"path", entry.name),
        kind=entry.kind,
        mode=entry.mode,
        size=size if entry.kind in (TarKind.FILE, TarKind.OTHER) else 0,
        modified_at=modified_at,
        link=records.get(b"linkpath", entry.link),
    )


def _parse_records(data: bytes) -> dict[bytes, bytes]:
    """PAX records: "LENGTH KEY=VALUE\\n", the length counting itself."""
    records = {}
    while data:
        digits, space, _ = data[:20].partition(b" ")
        if not space or not digits.isdigit():
            raise _invalid("an extended header out of form")
        length = int(digits)
        record = data[len(digits) + 1 : length]
        key, equals, value = record[:-1].partition(b"=")
        if length > len(data) or length <= len(digits) + 1 or not equals or record[-1:] != b"\n":
            raise _invalid("an extended header out of form")
        records[key] = value
        data = data[length:]
    return records


def _number(field: bytes) -> int:
    if field[0] & 0x80:
        # Base 256, for numbers that octal has no room for.
        number = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40:
            raise _invalid("a negative number")
        return number
    text = field.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise _invalid("a header with a bad number") from None


def _invalid(what: str) -> AgentFailure:
    return AgentFailure("cannot read the folder: its stream is no valid tar", f"it has {what}", code="agent_invalid")
