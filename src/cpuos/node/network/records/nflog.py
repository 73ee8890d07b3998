"""What the kernel logs of packets (linux/netfilter/nfnetlink_log.h), read. Pure: bytes in, packets out.

The payload is the beginning of a packet that a guest made: it is read as numbers at fixed places, and nothing else.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

__all__ = ["LoggedPacket", "read_packets"]

_PACKET = 4 << 8  # NFNL_SUBSYS_ULOG, NFULNL_MSG_PACKET
_FIRST_TYPE = 16  # what is below is netlink's own
_PAYLOAD, _PREFIX, _SEQUENCE = 9, 10, 12
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_FAMILY_BYTES = 4
_TYPE = 0x3FFF
_IP = struct.Struct("!BxHxxHxBxx4s4s")
_PORTS = struct.Struct("!HH")
_FRAGMENT = 0x1FFF
_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", socket.IPPROTO_ICMP: "icmp"}
_SYN_OF = 0x17  # fin, syn, rst, ack
_SYN, _ECHO_REQUEST = 2, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedPacket:
    prefix: str
    sequence: int | None
    """Counts from 0 since the socket was bound: a jump is a loss."""
    protocol: str
    """tcp, udp, icmp or other."""
    source: IPv4Address
    source_port: int | None
    address: IPv4Address
    port: int | None
    begins: bool
    """Whether it could begin a connection: a bare SYN, a ping, any UDP."""


def read_packets(messages: bytes) -> Iterator[LoggedPacket]:
    """The packets in what was read from a log socket; what is no IPv4 packet is left out."""
    offset = 0
    while offset + _HEADER.size <= len(messages):
        length, kind, _, _, _ = _HEADER.unpack_from(messages, offset)
        if length < _HEADER.size:
            return
        if kind == _PACKET and kind >= _FIRST_TYPE:
            packet = _read(messages[offset + _HEADER.size + _FAMILY_BYTES : offset + length])
            if packet is not None:
                yield packet
        offset += (length + 3) & ~3


def _read(body: bytes) -> LoggedPacket | None:
    prefix, payload, sequence, offset = "", b"", None, 0
    while offset + 4 <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < 4:
            return None
        kind &= _TYPE
        if kind == _PAYLOAD:
            payload = body[offset + 4 : offset + length]
        elif kind == _PREFIX:
            prefix = body[offset + 4 : offset + length].rstrip(b"\0").decode("ascii", "replace")
        elif kind == _SEQUENCE and length == 8:
            sequence = int.from_bytes(body[offset + 4 : offset + length])
        offset += (length + 3) & ~3
    return _packet(payload, prefix, sequence)


def _packet(payload: bytes, prefix: str, sequence: int | None) -> LoggedPacket | None:
    if len(payload) < _IP.size or payload[0] >> 4 != 4:
        return None
    first, _, fragment, number, source, address = _IP.unpack_from(payload)
    inner = payload[(first & 15) * 4 :] if not fragment & _FRAGMENT else b""
    protocol = _PROTOCOLS.get(number, "other")
    source_port = port = None
    begins = protocol == "udp"
    if protocol in ("tcp", "udp") and len(inner) >= 4:
        source_port, port = _PORTS.unpack_from(inner)
        if protocol == "tcp":
            begins = len(inner) >= 14 and inner[13] & _SYN_OF == _SYN
    elif protocol == "icmp":
        begins = inner[:1] == bytes([_ECHO_REQUEST])
    return LoggedPacket(
        prefix=prefix,
        sequence=sequence,
        protocol=protocol,
        source=IPv4Address(source),
        source_port=source_port,
        address=IPv4Address(address),
        port=port,
        begins=begins,
    )
