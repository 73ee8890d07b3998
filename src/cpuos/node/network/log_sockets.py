"""Sockets from which the records worker reads what the kernel saw. Opening them takes root, reading does not."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from cpuos.node.network.namespaces import inside
from cpuos.node.network.rules import LOG_GROUP

__all__ = ["open_end_socket", "open_log", "open_log_socket"]

_NETLINK_NETFILTER = 12  # linux/netlink.h
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h
# linux/netfilter/nfnetlink_log.h
_CONFIGURE = 4 << 8 | 1
_COMMAND, _MODE, _THRESHOLD, _FLAGS = 1, 2, 5, 6
_BIND, _COPY_PACKET, _NUMBERED = 1, 2, 1
_REQUEST, _ACK, _ERROR = 1, 4, 2
_ENDS = 1 << 2  # linux/netfilter/nfnetlink.h: group 3, NFNLGRP_CONNTRACK_DESTROY
_HEADER = struct.Struct("=IHHII")
_PACKET_BYTES = 128
_LOG_BUFFER, _END_BUFFER = 2 << 20, 16 << 20


def open_log_socket(router: Path) -> socket.socket:
    """What this router logs, each packet as it comes, numbered (NFULA_SEQ): a loss shows. One at a time."""
    return inside(router, open_log)


def open_end_socket(namespace: Path) -> socket.socket:
    """Every connection of this namespace as it ends, with bytes and times (the namespace's sysctls turn these on).

    The kernel tells only of connections that began while such a socket was open.
    """
    return inside(namespace, _open_ends)


def open_log() -> socket.socket:
    """The same in the router that the calling thread is in."""
    made = _netlink(buffer_bytes=_LOG_BUFFER)
    try:
        made.bind((0, 0))
        attributes = _attribute(_COMMAND, struct.pack("=B", _BIND))
        _ask(made, attributes)
        attributes = _attribute(_MODE, struct.pack(">IBB", _PACKET_BYTES, _COPY_PACKET, 0))
        attributes += _attribute(_THRESHOLD, struct.pack(">I", 1))
        attributes += _attribute(_FLAGS, struct.pack(">H", _NUMBERED))
        _ask(made, attributes)
    except BaseException:
        made.close()
        raise
    made.setblocking(False)
    return made


def _open_ends() -> socket.socket:
    made = _netlink(buffer_bytes=_END_BUFFER)
    try:
        made.bind((0, _ENDS))
    except BaseException:
        made.close()
        raise
    made.setblocking(False)
    return made


def _netlink(*, buffer_bytes: int) -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
    made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer_bytes)
    return made


def _ask(made: socket.socket, attributes: bytes) -> None:
    body = struct.pack(">BBH", socket.AF_UNSPEC, 0, LOG_GROUP) + attributes
    made.send(_HEADER.pack(_HEADER.size + len(body), _CONFIGURE, _REQUEST | _ACK, 0, 0) + body)
    while True:
        answer = made.recv(65536)
        # A packet may be logged between binding and the answer; it is only the first of what is read later anyway.
        if _HEADER.unpack_from(answer)[1] == _ERROR:
            code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
            if code:
                raise OSError(code, os.strerror(code))
            return


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)
