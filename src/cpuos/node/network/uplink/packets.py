"""IPv4 packets as they pass the hub's device: read as far as is needed, and written.

What is read was checked by the kernel (it forwarded it), and is a guest's all the same: nothing in it is trusted.
"""

from __future__ import annotations

import itertools
import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address

__all__ = ["ACCEPTED", "REFUSED", "Packet", "echo_packet", "parse_packet", "tagged", "udp_packet", "unreachable"]

ACCEPTED, REFUSED = 1, 2
"""What a SYN that is sent back is tagged with (DSCP): the hub's rules lead it to the listener, or to a closed port."""

PORT_UNREACHABLE, PROHIBITED = 3, 13
_UNREACHABLE, _ECHO_REPLY, _ECHO_REQUEST = 3, 0, 8
_PORTS = struct.Struct("!HH")
_HEADER = struct.Struct("!BBHHHBBH4s4s")
_MIN_HEADER, _TTL = 20, 64
_MOST_BYTES = 65535
_SYN, _FIRST_FLAGS = 0x02, 0x17  # fin, syn, rst, ack
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    data: bytes
    protocol: int
    key: bytes
    """Both addresses and both ports: the same for all packets of one direction of a connection. With an echo, its
    identifier stands where the ports are."""
    source: bytes
    address: IPv4Address
    """Where it goes."""
    port: int
    payload: bytes


def parse_packet(data: bytes) -> Packet | None:
    """A SYN, a whole datagram or an echo request; None for all else."""
    if len(data) < _MIN_HEADER or data[0] >> 4 != 4:
        return None
    header, total = (data[0] & 15) * 4, int.from_bytes(data[2:4], "big")
    is_fragment = int.from_bytes(data[6:8], "big") & 0x3FFF
    if header < _MIN_HEADER or not header + 8 <= total <= len(data) or is_fragment:
        return None
    body, protocol = data[header:total], data[9]
    ends, port, payload = body[:4], int.from_bytes(body[2:4], "big"), body[8:]
    if protocol == socket.IPPROTO_TCP:
        if len(body) < 20 or body[13] & _FIRST_FLAGS != _SYN:
            return None
    elif protocol == socket.IPPROTO_UDP:
        length = int.from_bytes(body[4:6], "big")
        if not 8 <= length <= len(body):
            return None
        payload = body[8:length]
    elif protocol == socket.IPPROTO_ICMP and body[:2] == bytes([_ECHO_REQUEST, 0]):
        ends, port, payload = body[4:6], 0, body
    else:
        return None
    return Packet(
        data=data[:total],
        protocol=protocol,
        key=data[12:20] + ends,
        source=data[12:16],
        address=IPv4Address(data[16:20]),
        port=port,
        payload=payload,
    )


def tagged(packet: Packet, tag: int) -> bytes:
    """The same packet with this tag, to be sent back."""
    wire = bytearray(packet.data)
    wire[1] = tag << 2
    wire[10:12] = b"\0\0"
    struct.pack_into("!H", wire, 10, _checksum(wire[: (wire[0] & 15) * 4]))
    return bytes(wire)


def udp_packet(packet: Packet, payload: bytes) -> bytes:
    """An answer to a datagram; empty where it does not fit into a packet."""
    if _MIN_HEADER + 8 + len(payload) > _MOST_BYTES:
        return b""
    source_port, port = _PORTS.unpack(packet.key[8:12])
    head = struct.pack("!HHHH", port, source_port, 8 + len(payload), 0)
    return _answer(packet, socket.IPPROTO_UDP, _with_checksum(packet, head + payload))


def echo_packet(packet: Packet, body: bytes) -> bytes:
    """An answer to an echo request: `body` as it came, with an identifier that is not the guest's."""
    return _answer(packet, socket.IPPROTO_ICMP, _icmp(_ECHO_REPLY, 0, packet.key[8:10] + body[6:8], body[8:]))


def unreachable(packet: Packet, code: int) -> bytes:
    """The far side's, or this uplink's, word that a packet was not delivered."""
    begin = packet.data[: (packet.data[0] & 15) * 4 + 8]
    return _answer(packet, socket.IPPROTO_ICMP, _icmp(_UNREACHABLE, code, b"\0\0\0\0", begin))


def _answer(packet: Packet, protocol: int, body: bytes) -> bytes:
    total = _MIN_HEADER + len(body)
    number = next(_numbers) & 0xFFFF
    fields = [0x45, 0, total, number, 0, _TTL, protocol, 0, packet.data[16:20], packet.data[12:16]]
    fields[7] = _checksum(_HEADER.pack(*fields))
    return _HEADER.pack(*fields) + body


def _icmp(kind: int, code: int, rest: bytes, data: bytes) -> bytes:
    body = bytearray(struct.pack("!BBH", kind, code, 0) + rest + data)
    struct.pack_into("!H", body, 2, _checksum(body))
    return bytes(body)


def _with_checksum(packet: Packet, body: bytes) -> bytes:
    pseudo = packet.data[16:20] + packet.data[12:16] + struct.pack("!HH", socket.IPPROTO_UDP, len(body))
    wire = bytearray(body)
    struct.pack_into("!H", wire, 6, _checksum(pseudo + body) or 0xFFFF)
    return bytes(wire)


def _checksum(data: bytes | bytearray) -> int:
    """RFC 1071, by one division: the sum of 16-bit words modulo 65535."""
    if len(data) % 2:
        data = bytes(data) + b"\0"
    rest = int.from_bytes(data, "big") % 0xFFFF
    return 0xFFFF - (rest or (0xFFFF if any(data) else 0))
