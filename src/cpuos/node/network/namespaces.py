"""Network namespaces kept by a file, and work done inside one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from cpuos.node import syscalls

__all__ = ["in_fresh_thread", "inside", "keep_namespace", "new_namespace", "release_namespace", "set_sysctls"]

T = TypeVar("T")
_OWN = "/proc/thread-self/ns/net"


def in_fresh_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own that ends with it: whatever namespace it moves to is left that way."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="cpuos-netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def inside(path: Path, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own in the network namespace with this name. What it opens stays there."""

    def run() -> T:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.setns(descriptor, syscalls.CLONE_NEWNET)
        finally:
            os.close(descriptor)
        return work()

    return in_fresh_thread(run)


def set_sysctls(values: Mapping[str, str]) -> None:
    """Of the calling thread's network namespace, by their path below /proc/sys; one that this kernel lacks is left.

    Where they cannot be written, as in some containers, it is enough that they are so already.
    """
    for name, value in values.items():
        path = Path("/proc/sys", name)
        try:
            path.write_text(value)
        except FileNotFoundError:
            continue
        except OSError:
            if path.read_text().strip() != value:
                raise


def new_namespace() -> int:
    """Move the calling thread into a new network namespace without IPv6 outside of `lo`; a descriptor of it."""
    syscalls.unshare(syscalls.CLONE_NEWNET)
    # Before any device exists: no link-local address, no router solicitation. `lo` keeps ::1, which programs want.
    for device, value in (("all", "1"), ("default", "1"), ("lo", "0")):
        path = Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6")
        if path.exists():
            path.write_text(value)
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def keep_namespace(path: Path) -> None:
    """Give the calling thread's network namespace a name in the file system, which holds it alive."""
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.close(fd)
    syscalls.mount(_OWN, str(path), flags=syscalls.MS_BIND)


def release_namespace(path: Path) -> None:
    """Take the name away; the namespace goes with its last socket and process. Nothing there is fine."""
    try:
        while True:  # more than one mount may lie here after a crash between two steps
            syscalls.umount(str(path), syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
    except OSError:
        pass
    path.unlink(missing_ok=True)
