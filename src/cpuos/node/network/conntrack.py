"""The connection table of a namespace: dumped, and entries taken out (linux/netfilter/nfnetlink_conntrack.h).

What a guest can put into an entry is numbers of fixed length, laid out by the kernel.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from types import TracebackType

__all__ = ["ConntrackSocket", "Flow", "read_flows"]

_NETLINK_NETFILTER = 12  # linux/netlink.h
_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_CONNTRACK = 1 << 8  # NFNL_SUBSYS_CTNETLINK
_NEW, _GET, _DELETE = _CONNTRACK, _CONNTRACK | 1, _CONNTRACK | 2
_TUPLE_ORIGINAL, _TUPLE_REPLY, _MARK, _COUNTERS_ORIGINAL, _COUNTERS_REPLY, _ID = 1, 2, 8, 9, 10, 12
_TUPLE_IP, _TUPLE_PROTOCOL = 1, 2
_SOURCE, _DESTINATION = 1, 2
_NUMBER, _SOURCE_PORT, _DESTINATION_PORT = 1, 2, 3
_BYTES = 2
_NESTED, _TYPE = 0x8000, 0x3FFF
_HEADER = struct.Struct("=IHHII")
_FAMILY = struct.pack("=BBH", socket.AF_INET, 0, 0)
_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", socket.IPPROTO_ICMP: "icmp"}


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One connection as its opener sees it."""

    protocol: str
    """tcp, udp, icmp, or the number of another."""
    source: IPv4Address
    source_port: int | None
    """None where the protocol has no ports."""
    address: IPv4Address
    port: int | None
    answered_by: IPv4Address
    """Whom its packets really went to: another than `address` where it was redirected."""
    mark: int
    bytes_sent: int
    bytes_received: int
    key: bytes
    """What the kernel wants to find it again."""


class ConntrackSocket:
    """A socket in the network namespace of the thread that opens it; usable from any, one at a time."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, _NETLINK_NETFILTER)
        self._number = 0

    def __enter__(self) -> ConntrackSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def flows(self) -> list[Flow]:
        """All IPv4 connections. One that opens or ends meanwhile may be missing, none is there twice."""
        number = self._send(_GET, _DUMP, _FAMILY)
        found: dict[bytes, Flow] = {}
        while True:
            answer = self._socket.recv(1 << 20)
            for kind, sequence, body in _messages(answer):
                if sequence != number:
                    continue
                if kind == _DONE:
                    return list(found.values())
                _raise_error(kind, body)
            found |= {flow.key: flow for flow in read_flows(answer)}

    def delete(self, flow: Flow) -> bool:
        """Take it out; False where it is gone already."""
        number = self._send(_DELETE, _ACK, _FAMILY + flow.key)
        while True:
            for kind, sequence, body in _messages(self._socket.recv(65536)):
                if sequence != number:
                    continue
                try:
                    _raise_error(kind, body)
                except FileNotFoundError:
                    return False
                return True

    def _send(self, kind: int, flags: int, body: bytes) -> int:
        self._number += 1
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, self._number, 0) + body)
        return self._number


def read_flows(messages: bytes) -> Iterator[Flow]:
    """The connections in what was read from a conntrack socket: of a dump, or of events."""
    for kind, _, body in _messages(messages):
        if kind in (_NEW, _DELETE):
            flow = _flow(body[len(_FAMILY) :])
            if flow is not None:
                yield flow


def _flow(body: bytes) -> Flow | None:
    raw = dict(_attributes(body))
    original, reply = raw.get(_TUPLE_ORIGINAL), raw.get(_TUPLE_REPLY)
    if original is None or reply is None:
        return None
    protocol, source, source_port, address, port = _tuple(original)
    key = _attribute(_TUPLE_ORIGINAL | _NESTED, original)
    if _ID in raw:  # another connection with the same ends is not this one
        key += _attribute(_ID, raw[_ID])
    return Flow(
        protocol=_PROTOCOLS.get(protocol, str(protocol)),
        source=source,
        source_port=source_port,
        address=address,
        port=port,
        answered_by=_tuple(reply)[1],
        mark=int.from_bytes(raw.get(_MARK, b""), "big"),
        bytes_sent=_bytes(raw.get(_COUNTERS_ORIGINAL, b"")),
        bytes_received=_bytes(raw.get(_COUNTERS_REPLY, b"")),
        key=key,
    )


def _tuple(body: bytes) -> tuple[int, IPv4Address, int | None, IPv4Address, int | None]:
    parts = dict(_attributes(body))
    ends, protocol = dict(_attributes(parts[_TUPLE_IP])), dict(_attributes(parts[_TUPLE_PROTOCOL]))
    return (
        protocol[_NUMBER][0],
        IPv4Address(ends[_SOURCE]),
        _port(protocol.get(_SOURCE_PORT)),
        IPv4Address(ends[_DESTINATION]),
        _port(protocol.get(_DESTINATION_PORT)),
    )


def _port(value: bytes | None) -> int | None:
    return None if value is None else int.from_bytes(value, "big")


def _bytes(counters: bytes) -> int:
    return int.from_bytes(dict(_attributes(counters)).get(_BYTES, b""), "big")


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, sequence, body) of each."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield kind, sequence, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4:
            return
        yield kind & _TYPE, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _raise_error(kind: int, body: bytes) -> None:
    if kind != _ERROR:
        return
    code = -struct.unpack_from("=i", body)[0]
    if code == errno.EINTR:
        code = errno.EAGAIN
    if code:
        raise OSError(code, os.strerror(code))
