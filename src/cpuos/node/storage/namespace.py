"""The node's own mount namespace: disks and network names are mounted there and nowhere else on the host.

It is kept by a file, so that a node that was killed finds its mounts again, and so that removing the file's mount
removes them all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import NoReturn

from cpuos.errors import PlatformError
from cpuos.node import syscalls

__all__ = ["enter_mount_namespace", "mount_alone", "release_mount_namespace"]

_NS_GET_NSTYPE = 0xB703  # linux/nsfs.h


def enter_mount_namespace(path: Path) -> None:
    """Join the mount namespace kept at `path`, or make it and keep it there.

    Call it first in the process: the kernel refuses it once there are threads.
    """
    try:
        kept = _open_kept(path)
        if kept is not None:
            try:
                syscalls.setns(kept, syscalls.CLONE_NEWNS)
            finally:
                os.close(kept)
            return
        _make_private(path.parent)
        path.touch(mode=0o600)
        _unshare_and_keep(path)
        # A slave still sees what the host mounts later, and the host sees nothing of ours.
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
    except OSError as problem:
        raise PlatformError(f"cannot enter the node's mount namespace: {path}", str(problem)) from problem


def release_mount_namespace(path: Path) -> None:
    """Give up the namespace kept at `path`: its mounts go when the last process in it ends. Nothing there is fine."""
    for target in (path, path.parent):
        try:
            syscalls.umount(str(target), syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        except OSError:
            pass
    path.unlink(missing_ok=True)


def mount_alone(source: Path, target: Path) -> None:
    """Mount the folder a second time. There already is fine.

    A sandbox has a user namespace of its own, so that the mounts it was started among stay tied together for it
    (mount_namespaces(7), locked mounts): while anything of it comes from one of them, all below that one live on too,
    other sandboxes' disks among them. What it keeps open is therefore taken from mounts with none below.
    """
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.path.samefile(source, target):
            syscalls.mount(str(source), str(target), flags=syscalls.MS_BIND)
    except OSError as problem:
        raise PlatformError(f"cannot mount: {target}", str(problem)) from problem


def _open_kept(path: Path) -> int | None:
    """The namespace kept at `path`, as this process sees it or as the first process of the machine does.

    A copied mount namespace lacks the mounts that keep others (fs/namespace.c copy_tree): a daemon started with
    mounts of its own, by a service manager or a shell, would not find its forerunner's, and lose every sandbox.
    """
    for seen in (path, Path(f"/proc/1/root{path}")):
        try:
            fd = os.open(seen, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            if fcntl.ioctl(fd, _NS_GET_NSTYPE) == syscalls.CLONE_NEWNS:
                return fd
        except OSError:
            pass  # a plain file: its mount went with a reboot
        os.close(fd)
    return None


def _make_private(folder: Path) -> None:
    """A namespace file can only be mounted where mounts do not propagate (mount_namespaces(7))."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(folder):
        syscalls.mount(str(folder), str(folder), flags=syscalls.MS_BIND)
    syscalls.mount("none", str(folder), flags=syscalls.MS_PRIVATE)


def _unshare_and_keep(path: Path) -> None:
    """The file must be mounted in the namespace that is left, so a child stays behind to do it.

    Linux mounts only namespaces with a higher number than the one they are mounted in, and gives each processor numbers
    of its own (fs/namespace.c mnt_ns_loop, 6.18): inside a container the first try may have a lower one. The processor
    that made the outer namespace gives higher ones for sure, so each is tried.
    """
    allowed = os.sched_getaffinity(0)
    ask_read, ask_write = os.pipe()
    told_read, told_write = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(ask_write)
        _mount_when_asked(path, parent=parent, asked=ask_read, told=told_write)
    os.close(ask_read)
    os.close(told_write)
    try:
        for processor in range(os.cpu_count() or 1):
            with contextlib.suppress(OSError):  # not one of ours
                os.sched_setaffinity(0, {processor})
            syscalls.unshare(syscalls.CLONE_NEWNS)
            os.write(ask_write, b"?")
            if os.read(told_read, 1) == b"y":
                return
    finally:
        os.close(ask_write)
        os.close(told_read)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, allowed)
    raise OSError(f"the namespace could not be mounted on {path}")


def _mount_when_asked(path: Path, *, parent: int, asked: int, told: int) -> NoReturn:
    """The child's part: one try for each byte, until the parent closes its end."""
    try:
        while os.read(asked, 1):
            try:
                syscalls.mount(f"/proc/{parent}/ns/mnt", str(path), flags=syscalls.MS_BIND)
            except OSError:
                os.write(told, b"n")
            else:
                os.write(told, b"y")
    finally:
        os._exit(0)
