"""What is done to the folder of one disk, wherever it lies: it is made, mounted, unmounted, removed. All of it blocks.

Errors are OSError; nothing there is fine where something is to go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from pathlib import Path

from cpuos.node import syscalls
from cpuos.node.storage.loop import attach_loop, loops_below

__all__ = ["is_mounted", "mount_disk", "prepare_folder", "remove_disk", "unmount_disk", "wait_released"]

_MOUNT_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOSYMFOLLOW | syscalls.MS_NOATIME
# fs/ext4/ext4.h: _IOR('X', 125, __u32) and EXT4_GOING_FLAGS_NOLOGFLUSH.
_EXT4_IOC_SHUTDOWN, _SHUTDOWN_WITHOUT_LOG = 0x8004587D, 2
# The first inode that mkfs gives out (ext4's EXT4_GOOD_OLD_FIRST_INO).
_LOST_FOUND_INODE = 11
# A gofer that is still on its way out keeps the mount busy for some milliseconds.
_BUSY_S = 2.0


def prepare_folder(folder: Path) -> None:
    """The folder with its two places. There already is fine."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("workspace", "overlay"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)


def mount_disk(folder: Path) -> None:
    """Mount its image, which nobody else holds."""
    fd = os.open(folder / "image", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        device, loop = attach_loop(fd)
        try:
            syscalls.mount(device, str(folder / "workspace"), kind="ext4", flags=_MOUNT_FLAGS, data="errors=remount-ro")
        finally:
            os.close(loop)
    finally:
        os.close(fd)
    _remove_lost_found(folder / "workspace")
    # A mount of its own for what the runtime keeps open in it (namespace.py, mount_alone).
    syscalls.mount(str(folder / "overlay"), str(folder / "overlay"), flags=syscalls.MS_BIND)


def is_mounted(folder: Path) -> bool:
    return os.lstat(folder / "workspace").st_dev != os.lstat(folder).st_dev


def wait_released(folder: Path) -> None:
    """An image has one holder: a lazy unmount may still have it for a moment."""
    deadline = time.monotonic() + _BUSY_S
    while loops_below(folder.resolve()):
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, "another loop device still holds the image")
        time.sleep(0.005)


def unmount_disk(folder: Path) -> None:
    deadline = time.monotonic() + _BUSY_S
    for place in (folder / "overlay", folder / "workspace"):
        while True:
            patient = time.monotonic() < deadline
            flags = syscalls.UMOUNT_NOFOLLOW | (0 if patient else syscalls.MNT_DETACH)
            try:
                syscalls.umount(str(place), flags)
            except OSError as problem:
                if problem.errno in (errno.EINVAL, errno.ENOENT):  # nothing is mounted there
                    break
                if problem.errno != errno.EBUSY or not patient:
                    raise
                time.sleep(0.005)


def remove_disk(path: Path) -> None:
    """Unmount it and remove all of it, by handles: no link of a guest is followed."""
    _abandon(path)
    unmount_disk(path)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        # The record goes first: what is left without it is an unfinished disk that a create makes anew.
        _unlink(folder, "disk.json")
        _unlink(folder, "image")
        _remove_folder(folder, "workspace")
        _remove_folder(folder, "overlay")
        for name in os.listdir(folder):
            _unlink(folder, name)
        os.rmdir(path)
    finally:
        os.close(folder)


def _remove_lost_found(workspace: Path) -> None:
    """A new file system has it; a user's empty folder has not. A name of the user's own is not touched (not root's)."""
    path = workspace / "lost+found"
    try:
        facts = os.lstat(path)
        if facts.st_uid == 0 and facts.st_ino == _LOST_FOUND_INODE:
            os.rmdir(path)
    except OSError:
        pass


def _abandon(folder: Path) -> None:
    """Throw away what was not written yet: writing gigabytes into an image that goes next would take seconds."""
    try:
        if is_mounted(folder):
            fd = os.open(folder / "workspace", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _SHUTDOWN_WITHOUT_LOG))
            finally:
                os.close(fd)
    except OSError:
        pass  # nothing there, or an older kernel: the unmount writes it all then


def _unlink(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def _remove_folder(parent: int, name: str) -> None:
    """Remove a folder of ours with the plain files in it; it has no others."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        if os.fstat(fd).st_dev != os.fstat(parent).st_dev:
            raise OSError(errno.EBUSY, "still mounted", name)
        for entry in os.listdir(fd):
            _unlink(fd, entry)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
