"""Which blocks a file has, and whether others have them too. It blocks; errors are OSError."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile
from pathlib import Path

from cpuos.node.storage.copying import share

__all__ = ["shared_bytes", "shares_blocks"]

# linux/fiemap.h
_FIEMAP = 0xC020660B
_SHARED, _LAST = 0x2000, 0x1
_HEAD, _EXTENT = struct.Struct("=QQIIII"), struct.Struct("=QQQQQIIII")
_AT_ONCE = 256


def shared_bytes(path: Path) -> int:
    """Bytes of the file in blocks that other files have too; 0 where the volume does not say."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return _shared(fd)
    except OSError as problem:
        if problem.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
            return 0
        raise
    finally:
        os.close(fd)


def _shared(fd: int) -> int:
    start, shared, size = 0, 0, os.fstat(fd).st_size
    while start < size:
        asked = bytearray(_HEAD.pack(start, size - start, 0, 0, _AT_ONCE, 0) + bytes(_EXTENT.size * _AT_ONCE))
        fcntl.ioctl(fd, _FIEMAP, asked)
        mapped = _HEAD.unpack_from(asked)[3]
        for number in range(mapped):
            logical, _, length, _, _, flags, *_ = _EXTENT.unpack_from(asked, _HEAD.size + number * _EXTENT.size)
            shared += length if flags & _SHARED else 0
            start = logical + length
            if flags & _LAST:
                return shared
        if mapped == 0:
            break
    return shared


def shares_blocks(folder: Path) -> bool:
    """Whether a copy of a file on this volume shares its blocks: tried."""
    with tempfile.TemporaryFile(dir=folder) as source, tempfile.TemporaryFile(dir=folder) as target:
        source.write(bytes(4096))
        source.flush()
        try:
            return share(source.fileno(), target.fileno())
        except OSError:
            return False
