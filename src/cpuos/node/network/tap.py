"""A tap device: frames that a VMM writes come out of it, as if a cable led to the guest. And a tun, for packets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct

__all__ = ["make_tap", "open_tap", "open_tun"]

_CONTROL = "/dev/net/tun"
# linux/if_tun.h, linux/sockios.h, linux/if_arp.h
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TUN, _IFF_TAP, _IFF_NO_PI = 0x0001, 0x0002, 0x1000
_SIOCSIFHWADDR, _ARPHRD_ETHER = 0x8924, 1
_REQUEST = struct.Struct("16sH22x")


def make_tap(name: str, *, mac: str) -> None:
    """In the calling thread's network namespace; it stays when nobody has it open."""
    descriptor = open_tap(name)
    try:
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
    finally:
        os.close(descriptor)
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)) as control:
        address = struct.pack("16sH6s16x", name.encode(), _ARPHRD_ETHER, bytes.fromhex(mac.replace(":", "")))
        fcntl.ioctl(control, _SIOCSIFHWADDR, address)


def open_tap(name: str) -> int:
    """The other end of the device of this name, made where there is none: one frame a read or write."""
    return _open(name, _IFF_TAP)


def open_tun(name: str) -> int:
    """A new device of this name that ends with its last descriptor: one IP packet a read or write."""
    return _open(name, _IFF_TUN)


def _open(name: str, kind: int) -> int:
    descriptor = _open_control()
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, _REQUEST.pack(name.encode(), kind | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open_control() -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(_CONTROL, flags)
    except FileNotFoundError:
        # No devtmpfs here: the kernel may have the driver, and nobody made the node of its device.
        os.makedirs(os.path.dirname(_CONTROL), exist_ok=True)
        try:
            os.mknod(_CONTROL, 0o600 | stat.S_IFCHR, os.makedev(10, 200))
        except FileExistsError:
            pass
        return os.open(_CONTROL, flags)
