"""Copies of images: blocks are shared where the volume can, else only the parts that hold data are copied. It blocks.

Errors are OSError; what is at the target then is of no use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from cpuos.node import syscalls
from cpuos.node.storage.room import require_room

__all__ = ["copy_image", "data_ranges", "frozen", "share", "sync_all", "thaw"]

# linux/fs.h
_FICLONE = 0x40049409
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878
_PIECE = 64 << 20


def copy_image(source: Path, target: Path) -> None:
    """Make `target`, which is not there yet, with the content of `source`, and put it on disk."""
    read = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        write = os.open(target, flags, 0o600)
        try:
            if not share(read, write):
                parts = list(data_ranges(read))
                require_room(write, sum(end - start for start, end in parts))
                os.ftruncate(write, os.fstat(read).st_size)
                for start, end in parts:
                    _copy_range(read, write, start=start, end=end)
            os.fsync(write)
        finally:
            os.close(write)
    finally:
        os.close(read)


@contextlib.contextmanager
def frozen(mounted: Path) -> Iterator[None]:
    """Its file system is whole on its image meanwhile, and takes no writes: whoever writes waits."""
    folder = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.ioctl(folder, _FIFREEZE, 0)
        try:
            yield
        finally:
            _thaw(folder)
    finally:
        os.close(folder)


def thaw(mounted: Path) -> None:
    """What a copy that was cut short has frozen goes on. Not frozen is fine."""
    folder = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _thaw(folder)
    finally:
        os.close(folder)


def sync_all(mounted: Path) -> None:
    """All that was written to its file system is on the volume when this returns."""
    folder = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        syscalls.syncfs(folder)
    finally:
        os.close(folder)


def _thaw(folder: int) -> None:
    try:
        fcntl.ioctl(folder, _FITHAW, 0)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # it was not frozen
            raise


def share(read: int, write: int) -> bool:
    """Both have the same blocks until one is written to; False where the volume cannot."""
    try:
        fcntl.ioctl(write, _FICLONE, read)
    except OSError as problem:
        if problem.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS):
            return False
        raise
    return True


def data_ranges(read: int) -> Iterator[tuple[int, int]]:
    """From where to where it holds data: blocks that are only held for it are none."""
    size, offset = os.fstat(read).st_size, 0
    while offset < size:
        try:
            start = os.lseek(read, offset, os.SEEK_DATA)
        except OSError as problem:
            if problem.errno == errno.ENXIO:  # a hole until the end
                return
            raise
        offset = os.lseek(read, start, os.SEEK_HOLE)
        yield start, offset


def _copy_range(read: int, write: int, *, start: int, end: int) -> None:
    while start < end:
        count = os.copy_file_range(read, write, min(end - start, _PIECE), start, start)
        if count == 0:
            raise OSError(errno.EIO, "the image became shorter meanwhile")
        start += count
