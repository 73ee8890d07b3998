"""A small archive in cpio's `newc` form, from which a guest kernel makes its first root.

Linux Documentation/driver-api/early-userspace/buffer-format.rst. Equal contents give equal bytes: there is no time and
no owner in it but 0.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass

__all__ = ["Entry", "device", "file", "folder", "pack"]

_TRAILER = "TRAILER!!!"


@dataclass(frozen=True, kw_only=True)
class Entry:
    path: str
    mode: int
    data: bytes = b""
    major: int = 0
    minor: int = 0


def folder(path: str) -> Entry:
    return Entry(path=path, mode=stat.S_IFDIR | 0o755)


def file(path: str, data: bytes, *, executable: bool = False) -> Entry:
    return Entry(path=path, mode=stat.S_IFREG | (0o755 if executable else 0o644), data=data)


def device(path: str, *, major: int, minor: int) -> Entry:
    """A character device."""
    return Entry(path=path, mode=stat.S_IFCHR | 0o600, major=major, minor=minor)


def pack(entries: list[Entry]) -> bytes:
    """The archive; a folder has to come before what is in it."""
    out = bytearray()
    for number, entry in enumerate([*entries, Entry(path=_TRAILER, mode=0)], 1):
        _add(out, entry, number)
    return bytes(out)


def _add(out: bytearray, entry: Entry, number: int) -> None:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (number, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, entry.major, entry.minor, len(name), 0)
    out += b"070701" + b"".join(b"%08x" % value for value in numbers) + name
    _align(out)
    out += entry.data
    _align(out)


def _align(out: bytearray) -> None:
    out += b"\0" * (-len(out) % 4)
