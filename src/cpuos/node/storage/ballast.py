"""Room that nobody else can take: a file that is given up when the volume is full, so that what must be written then
can be: what the guests had in hand, journals, a sandbox's end. All of it blocks."""

from __future__ import annotations

import os
from pathlib import Path

from cpuos.node.storage.room import free_bytes, volume_bytes

__all__ = ["Ballast"]

# Of a small volume it is no more than this share.
_SHARE = 20


class Ballast:
    """One file on the volume; its blocks are what it is for."""

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        self._path = path
        self._wanted = size_bytes

    @property
    def size_bytes(self) -> int:
        """What it is when it is whole."""
        return min(self._wanted, volume_bytes(self._path.parent) // _SHARE)

    @property
    def held_bytes(self) -> int:
        try:
            return self._path.lstat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def give(self) -> None:
        """Its room is the volume's again. Frees blocks and needs none: the file stays, empty."""
        try:
            os.truncate(self._path, 0)
        except FileNotFoundError:
            return

    def take(self, *, leave: int) -> bool:
        """Make it whole, where so much is free after it; says whether it is."""
        size = self.size_bytes
        held = self.held_bytes
        if held >= size:
            return True
        if free_bytes(self._path.parent) < size - held + leave:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.ftruncate(descriptor, 0)
            return False
        finally:
            os.close(descriptor)
        return True
