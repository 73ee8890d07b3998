"""A guest's memory as a file that its VMM maps and never has a path of.

A VMM wants to open what it maps by name and for writing. In its jail that open is answered from outside, by the
kernel's way for that (seccomp's user notification): it gets the descriptor that the driver has chosen. So one that
begins anew gets a file without a name, and one that is taken up the saved file of its image, open for reading alone: it
maps that privately, many share its pages, and none of them can write into it, whatever becomes of the VMM.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["answer_open", "copy_file", "copy_memory", "held_memory", "make_memory"]

HELD_AS = 1000
"""Its number in the VMM: beyond all that a VMM has opened by then."""
# linux/seccomp.h
_NOTIFY_RECEIVE, _NOTIFY_ADD = 0xC0502100, 0x40182103
_SET_NUMBER, _ANSWER = 1, 2
_NOTICE_BYTES = 80
_PIDFD_GETFD = 438
_FICLONE = 0x40049409  # linux/fs.h
_PIECE = 4 << 20
_GRAIN = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


def make_memory(size_mib: int) -> int:
    """Empty; it takes room as the guest touches it, in the VMM's control group. Raises OSError."""
    descriptor = os.memfd_create("guest", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_mib << 20)
    return descriptor


def answer_open(connection: socket.socket, memory: int, *, limit_s: float) -> None:
    """The program that enters its jail tells by `connection` of the one open that it may make, and gets `memory` for
    it. One that ends before is fine: whoever started it sees that. Raises OSError, TimeoutError."""
    connection.settimeout(limit_s)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        return
    listener = descriptors[0]
    try:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        events = poll.poll(1e3 * limit_s)
        if not events:
            raise TimeoutError("it did not open its memory")
        if not events[0][1] & select.POLLIN:
            return
        notice = bytearray(_NOTICE_BYTES)
        fcntl.ioctl(listener, _NOTIFY_RECEIVE, notice)
        (number,) = struct.unpack_from("Q", notice)
        answer = struct.pack("QIIII", number, _SET_NUMBER | _ANSWER, memory, HELD_AS, 0)
        fcntl.ioctl(listener, _NOTIFY_ADD, answer)
    except OSError as problem:
        if problem.errno != errno.ENOENT:  # it has ended meanwhile
            raise
    finally:
        os.close(listener)


def held_memory(pidfd: int, *, size_mib: int) -> int:
    """The file that this VMM was given. It may have put another one in its place, which must then be a plain file too:
    no more is asked of it than its bytes. Raises OSError."""
    descriptor = int(_libc.syscall(_PIDFD_GETFD, pidfd, HELD_AS, 0))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "pidfd_getfd")
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != size_mib << 20:
        os.close(descriptor)
        raise OSError(errno.EBADF, "what it holds is not its memory")
    return descriptor


def copy_memory(read: int, target: Path) -> None:
    """Make `target`, which is not there, with what is not zero: the kernel gave the guest pages for reading too."""
    write, size = _make(target), os.fstat(read).st_size
    try:
        os.ftruncate(write, size)
        nothing = bytes(_PIECE)
        for start, end in _data(read, size=size):
            for offset in range(start, end, _PIECE):
                piece = memoryview(os.pread(read, min(end - offset, _PIECE), offset))
                if piece == nothing[: len(piece)]:
                    continue
                for at in range(0, len(piece), _GRAIN):
                    grain = piece[at : at + _GRAIN]
                    if grain != nothing[: len(grain)]:
                        os.pwrite(write, grain, offset + at)
    finally:
        os.close(write)


def copy_file(source: Path, target: Path) -> None:
    """Make `target`, which is not there, with the content of `source`: blocks are shared where the volume can, else the
    parts that hold data are copied. Raises OSError."""
    read = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        write = _make(target)
        try:
            if not _shared(read, write):
                size = os.fstat(read).st_size
                os.ftruncate(write, size)
                for start, end in _data(read, size=size):
                    _copy(read, write, start=start, end=end)
        finally:
            os.close(write)
    finally:
        os.close(read)


def _make(target: Path) -> int:
    return os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _shared(read: int, write: int) -> bool:
    try:
        fcntl.ioctl(write, _FICLONE, read)
    except OSError as problem:
        if problem.errno not in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS):
            raise
        return False
    return True


def _data(read: int, *, size: int) -> Iterator[tuple[int, int]]:
    offset = 0
    while offset < size:
        try:
            start = os.lseek(read, offset, os.SEEK_DATA)
        except OSError as problem:
            if problem.errno == errno.ENXIO:  # a hole until the end
                return
            raise
        offset = min(size, os.lseek(read, start, os.SEEK_HOLE))
        yield start, offset


def _copy(read: int, write: int, *, start: int, end: int) -> None:
    while start < end:
        count = os.copy_file_range(read, write, end - start, start, start)
        if count == 0:
            raise OSError(errno.EIO, "the file became shorter meanwhile")
        start += count
