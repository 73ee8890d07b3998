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

from cpuos.runtimes.descriptors import move_up

__all__ = ["ConntrackSocket", "Flow", "flow_key", "read_flows"]

_NETLINK_NETFILTER = 12  # linux/netlink.h
_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_CONNTRACK = 1 << 8  # NFNL_SUBSYS_CTNETLINK
_NEW, _GET, _DELETE, _STATISTICS = _CONNTRACK, _CONNTRACK | 1, _CONNTRACK | 2, _CONNTRACK | 5
_ENTRIES = 1
_TUPLE_ORIGINAL, _TUPLE_REPLY, _MARK, _COUNTERS_ORIGINAL, _COUNTERS_REPLY, _ID = 1, 2, 8, 9, 10, 12
_TUPLE_IP, _TUPLE_PROTOCOL = 1, 2
_SOURCE, _DESTINATION = 1, 2
_NUMBER, _SOURCE_PORT, _DESTINATION_PORT = 1, 2, 3
_FILTER, _FILTER_ORIGINAL, _FILTER_SOURCE = 25, 1, 1  # of 5.8; a kernel before that dumps all, and we choose
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
    mapped_port: int | None
    """The source port that the far side sees."""
    mark: int
    bytes_sent: int
    bytes_received: int
    key: bytes
    """What the kernel wants to find it again."""


class ConntrackSocket:
    """A socket in the network namespace of the thread that opens it; usable from any, one at a time."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        made = socket.socket(socket.AF_NETLINK, kind, _NETLINK_NETFILTER)
        self._socket = socket.socket(made.family, made.type, made.proto, fileno=move_up(made.detach()))
        self._number = 0

    def __enter__(self) -> ConntrackSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def flows(self, *, source: IPv4Address | None = None) -> list[Flow]:
        """All IPv4 connections, or those that `source` opened. One that opens or ends meanwhile may be missing, none is
        there twice."""
        if not self.count():  # a dump walks the table of all namespaces: some milliseconds, for nothing here
            return []
        number = self._send(_GET, _DUMP, _FAMILY + (_only_from(source) if source else b""))
        found: dict[bytes, Flow] = {}
        while True:
            answer = self._socket.recv(1 << 20)
            for kind, sequence, body in _messages(answer):
                if sequence != number:
                    continue
                if kind == _DONE:
                    return [flow for flow in found.values() if source in (None, flow.source)]
                _raise_error(kind, body)
            found |= {flow.key: flow for flow in read_flows(answer)}

    def count(self) -> int:
        """How many connections this namespace has."""
        number = self._send(_STATISTICS, 0, _FAMILY)
        while True:
            for kind, sequence, body in _messages(self._socket.recv(65536)):
                if sequence == number:
                    _raise_error(kind, body)
                    return int.from_bytes(dict(_attributes(body[len(_FAMILY) :])).get(_ENTRIES, b""), "big")

    def delete(self, flow: Flow) -> bool:
        """Take it out; False where it is gone already."""
        return self.delete_key(flow.key)

    def delete_key(self, key: bytes) -> bool:
        number = self._send(_DELETE, _ACK, _FAMILY + key)
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


def flow_key(protocol: str, source: IPv4Address, source_port: int, *, address: IPv4Address, port: int) -> bytes:
    """The key of a TCP or UDP connection that was not dumped."""
    number = {name: number for number, name in _PROTOCOLS.items()}[protocol]
    ends = _attribute(_SOURCE, source.packed) + _attribute(_DESTINATION, address.packed)
    kind = _attribute(_NUMBER, bytes([number]))
    kind += _attribute(_SOURCE_PORT, struct.pack("!H", source_port))
    kind += _attribute(_DESTINATION_PORT, struct.pack("!H", port))
    both = _attribute(_TUPLE_IP | _NESTED, ends) + _attribute(_TUPLE_PROTOCOL | _NESTED, kind)
    return _attribute(_TUPLE_ORIGINAL | _NESTED, both)


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
    _, answered_by, _, _, mapped_port = _tuple(reply)
    key = _attribute(_TUPLE_ORIGINAL | _NESTED, original)
    if _ID in raw:  # another connection with the same ends is not this one
        key += _attribute(_ID, raw[_ID])
    return Flow(
        protocol=_PROTOCOLS.get(protocol, str(protocol)),
        source=source,
        source_port=source_port,
        address=address,
        port=port,
        answered_by=answered_by,
        mapped_port=mapped_port,
        mark=int.from_bytes(raw.get(_MARK, b""), "big"),
        bytes_sent=_bytes(raw.get(_COUNTERS_ORIGINAL, b"")),
        bytes_received=_bytes(raw.get(_COUNTERS_REPLY, b"")),
        key=key,
    )


def _only_from(source: IPv4Address) -> bytes:
    ends = _attribute(_TUPLE_IP | _NESTED, _attribute(_SOURCE, source.packed))
    chosen = _attribute(_FILTER_ORIGINAL, struct.pack("=I", _FILTER_SOURCE))
    return _attribute(_TUPLE_ORIGINAL | _NESTED, ends) + _attribute(_FILTER | _NESTED, chosen)


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
