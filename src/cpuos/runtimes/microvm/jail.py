"""Puts a VMM into its jail and becomes it: `python -I -S jail.py`, the plan on stdin, by `marshal`.

Run as root; what it becomes is a user of its own without a capability, in namespaces of its own, whose root holds the
host's programs read-only and a few devices. Files, tap and listening socket are opened before and handed over as open
descriptors, so no path of the host is reached from inside. Nothing is imported but the standard library: it starts in
milliseconds, and the code that runs as root with hostile names near is this page.
"""

from __future__ import annotations

import _socket
import ctypes
import fcntl
import marshal
import os
import resource
import stat
import struct
import sys

__all__ = ["main"]

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/if_tun.h
_NEWNS, _NEWUTS, _NEWIPC, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_NO_NEW_PRIVS = 38
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_PIVOT_ROOT = 155  # x86_64
# linux/seccomp.h, linux/bpf_common.h, linux/audit.h
_SECCOMP, _NEW_LISTENER, _TELL, _ALLOW = 317, 8, 0x7FC00000, 0x7FFF0000
_LOAD, _IF_EQUAL, _RETURN, _X86_64, _OPENAT = 0x20, 0x15, 0x06, 0xC000003E, 257
_DEVICES = {"null": (1, 3), "zero": (1, 5), "random": (1, 8), "urandom": (1, 9)}
_KVM = (10, 232)

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    plan = marshal.loads(sys.stdin.buffer.read())  # its parent has written it
    os.umask(0o077)
    for group in plan["groups"]:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    descriptors = [int(number) for number in plan["keep"]]
    if plan["ask"] is not None:
        descriptors.append(plan["ask"])
    for number, (path, writable) in plan["files"].items():
        flags = os.O_RDWR if writable else os.O_RDONLY
        _hand_over(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW), int(number), descriptors)
    if plan["tap"]:
        number, namespace, name = plan["tap"]
        _hand_over(_open_tap(namespace, name), int(number), descriptors)
    _call("unshare", _libc.unshare(ctypes.c_int(_NEWNS | _NEWUTS | _NEWIPC | _NEWNET)))
    _change_root(plan["root"], boot=plan["boot"], uid=plan["uid"], kvm=plan["kvm"])
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    _close_others(descriptors)
    for name, limit in plan["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    os.setgroups([])
    os.setresgid(plan["uid"], plan["uid"], plan["uid"])
    os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    _call("prctl", _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    if plan["ask"] is not None:
        _ask_for_memory(plan["ask"])
    os.execve(plan["argv"][0], plan["argv"], plan["environment"])


def _hand_over(descriptor: int, number: int, kept: list[int]) -> None:
    """Under a number of its own, for the program that this becomes."""
    os.dup2(descriptor, number, inheritable=True)
    if descriptor != number:
        os.close(descriptor)
    kept.append(number)


def _open_tap(namespace: str, name: str) -> int:
    """The slot's device, in the router's namespace, which is left again with the next `unshare`."""
    where = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    _call("setns", _libc.setns(ctypes.c_int(where), ctypes.c_int(_NEWNET)))
    os.close(where)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    # Without a header for offloads: the host's kernel has that much less of the guest's to parse.
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def _change_root(root: str, *, boot: str, uid: int, kvm: bool) -> None:
    """A root with programs, libraries and what a guest boots from, read-only, and devices: nothing of the host's
    besides."""
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NOEXEC, "size=64k,mode=0755")
    os.umask(0o022)
    for name in ("usr", "boot", "dev", "old"):
        os.mkdir(f"{root}/{name}")
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    for name, source in (("usr", "/usr"), ("boot", boot)):
        _mount(source, f"{root}/{name}", "", _BIND)
        _mount("none", f"{root}/{name}", "", _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)
    for name, (major, minor) in _DEVICES.items():
        _make_device(f"{root}/dev/{name}", major, minor, mode=0o666, uid=0)
    if kvm:
        _make_device(f"{root}/dev/kvm", *_KVM, mode=0o600, uid=uid)
    os.chdir(root)
    _call("pivot_root", _libc.syscall(_PIVOT_ROOT, b".", b"old"))
    os.chdir("/")
    _call("umount", _libc.umount2(b"/old", _DETACH))
    os.rmdir("/old")
    _mount("none", "/", "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NOEXEC)


def _make_device(path: str, major: int, minor: int, *, mode: int, uid: int) -> None:
    os.mknod(path, mode | stat.S_IFCHR, os.makedev(major, minor))
    os.chmod(path, mode)
    os.chown(path, uid, uid)


def _ask_for_memory(number: int) -> None:
    """From here on an open for writing, as a VMM makes it of its guest's memory and of nothing else, is answered by
    whoever listens at the other end of this socket. When that is done nobody listens, and it fails."""
    words = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_IF_EQUAL, 0, 5, _X86_64),
        (_LOAD, 0, 0, 0),  # the call
        (_IF_EQUAL, 0, 3, _OPENAT),
        (_LOAD, 0, 0, 32),  # its flags
        (_IF_EQUAL, 0, 1, os.O_RDWR),
        (_RETURN, 0, 0, _TELL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *word) for word in words))
    program = struct.pack("HxxxxxxQ", len(words), ctypes.addressof(code))
    listener = _libc.syscall(_SECCOMP, 1, _NEW_LISTENER, program)
    if listener < 0:
        _call("seccomp", listener)
    ask = _socket.socket(fileno=number)
    ask.sendmsg([b"m"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))])
    ask.close()
    os.close(listener)


def _close_others(kept: list[int]) -> None:
    last = 3
    for number in [*sorted(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]:
        os.closerange(last, number)
        last = number + 1


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
        sys.exit(f"cannot enter the jail: {problem}")
