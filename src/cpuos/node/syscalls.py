"""The few Linux calls that Python 3.11 has no name for. Each raises OSError with the kernel's errno."""

from __future__ import annotations

import ctypes
import os

__all__ = [
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "MNT_DETACH",
    "MS_BIND",
    "MS_NOATIME",
    "MS_NODEV",
    "MS_NOSUID",
    "MS_NOSYMFOLLOW",
    "MS_PRIVATE",
    "MS_REC",
    "MS_SLAVE",
    "UMOUNT_NOFOLLOW",
    "exchange",
    "mount",
    "setns",
    "syncfs",
    "umount",
    "unshare",
]

# linux/sched.h and linux/mount.h
CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_NOSUID = 2
MS_NODEV = 4
MS_NOSYMFOLLOW = 256
MS_NOATIME = 1024
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Give the calling thread new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flags: int) -> None:
    """Move the calling thread into the namespace behind `fd`."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, *, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), os.fsencode(kind), ctypes.c_ulong(flags), os.fsencode(data)
    )
    _check(result, target)


def umount(target: str, flags: int = 0) -> None:
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), target)


def exchange(one: os.PathLike[str], other: os.PathLike[str]) -> None:
    """Each has the other's name, at once."""
    here, swap = ctypes.c_int(-100), ctypes.c_uint(2)  # AT_FDCWD, RENAME_EXCHANGE
    _check(_libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap), os.fspath(other))


def syncfs(fd: int) -> None:
    """All that was written to the file system of `fd` is on its device when this returns."""
    _check(_libc.syncfs(ctypes.c_int(fd)), "syncfs")


def _check(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
