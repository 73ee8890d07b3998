"""Prepares what Firecracker's jailer is to lock up, and becomes the jailer: `python -I -S jailer_entry.py`, the plan on
stdin.

Run as root. The jail's root is a small file system in memory that only this process's mounts know: it ends with them,
whatever the VMM leaves in it. What the machine may have is mounted there, file by file, from folders that only root can
enter; so the node has no path into the jail, and none out of it. Nothing is imported but the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import os
import resource
import struct
import sys

__all__ = ["main"]

# linux/sched.h, linux/mount.h, linux/if_tun.h
_NEWNS, _NEWUTS, _NEWIPC, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_TUNSETIFF, _TUNSETOWNER, _TUNSETGROUP = 0x400454CA, 0x400454CC, 0x400454CE
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    plan = marshal.loads(sys.stdin.buffer.read())  # its parent has written it
    os.umask(0o077)
    for group in plan["groups"]:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    if plan["tap"]:
        _own_tap(*plan["tap"], uid=plan["uid"])
    apart = _NEWNS | _NEWUTS | _NEWIPC | (0 if plan["tap"] else _NEWNET)
    _call("unshare", _libc.unshare(ctypes.c_int(apart)))
    _mount("none", "/", "", _REC | _PRIVATE)
    # The jailer makes devices here, and a copy of the program; it is nobody else's.
    _mount("tmpfs", plan["base"], "tmpfs", _NOSUID, f"size={plan['size_mib']}m,nr_inodes=256,mode=0755")
    os.umask(0o022)
    os.makedirs(plan["root"])
    for source, target, writable in plan["binds"]:
        _bind(source, f"{plan['root']}/{target}", writable=writable)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for name in ("CORE", "MEMLOCK"):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (0, 0))
    os.setgroups([])
    os.umask(0o077)
    os.execve(plan["argv"][0], plan["argv"], plan["environment"])


def _own_tap(namespace: str, name: str, *, uid: int) -> None:
    """The slot's device can be opened by that user alone, in the router's namespace, which the jailer joins too."""
    where = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    _call("setns", _libc.setns(ctypes.c_int(where), ctypes.c_int(_NEWNET)))
    os.close(where)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    fcntl.ioctl(tap, _TUNSETOWNER, uid)
    fcntl.ioctl(tap, _TUNSETGROUP, uid)
    os.close(tap)


def _bind(source: str, target: str, *, writable: bool) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
    _mount(source, target, "", _BIND)
    read_only = 0 if writable else _RDONLY
    _mount("none", target, "", _BIND | _REMOUNT | _NOSUID | _NODEV | _NOEXEC | read_only)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments: list[object] = [source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()]
    _call(f"mount {target}", _libc.mount(*arguments))


def _call(name: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        sys.exit(f"cannot prepare the jail: {problem}")
