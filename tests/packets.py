"""Frames as a hostile guest would write them: every field can be what it should not be."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from cpuos.node.network.plan import GUEST_MAC, ROUTER_MAC
from cpuos.runtimes.base import GUEST_ADDRESS, ROUTER_ADDRESS

SYN, ACK, RST, FIN, PSH = 2, 16, 4, 1, 8
IPV4, ARP, IPV6 = 0x0800, 0x0806, 0x86DD
ECHO, ECHO_ANSWER, UNREACHABLE, REDIRECT, TIMESTAMP = 8, 0, 3, 5, 13
PORT_UNREACHABLE, ADMIN_PROHIBITED = 3, 13


def ethernet(payload: bytes, *, kind: int = IPV4, source: str = GUEST_MAC, target: str = ROUTER_MAC) -> bytes:
    return _mac(target) + _mac(source) + struct.pack("!H", kind) + payload


def ip(
    payload: bytes,
    target: str,
    *,
    protocol: int,
    source: str = GUEST_ADDRESS,
    options: bytes = b"",
    fragment: int = 0,
    version: int = 4,
    identity: int = 7,
    hops: int = 64,
) -> bytes:
    """`fragment`: offset in units of 8 bytes, with 0x2000 for "more follow"."""
    words = 5 + len(options) // 4
    head = struct.pack(
        "!BBHHHBBH4s4s",
        version << 4 | words,
        0,
        words * 4 + len(payload),
        identity,
        fragment,
        hops,
        protocol,
        0,
        socket.inet_aton(source),
        socket.inet_aton(target),
    )
    return _with_checksum(head + options, 10) + payload


def tcp(target: str, port: int, *, flags: int = SYN, source: str = GUEST_ADDRESS, source_port: int = 40000) -> bytes:
    segment = struct.pack("!HHIIBBHHH", source_port, port, 1000, 0, 5 << 4, flags, 65535, 0, 0)
    return _with_checksum(segment, 16, pseudo=_pseudo(source, target, socket.IPPROTO_TCP, len(segment)))


def udp(
    target: str, port: int, *, payload: bytes = b"x", source: str = GUEST_ADDRESS, source_port: int = 40000
) -> bytes:
    datagram = struct.pack("!HHHH", source_port, port, 8 + len(payload), 0) + payload
    return _with_checksum(datagram, 6, pseudo=_pseudo(source, target, socket.IPPROTO_UDP, len(datagram)))


def icmp(*, kind: int = ECHO, code: int = 0, identity: int = 1, payload: bytes = b"x" * 8) -> bytes:
    return _with_checksum(struct.pack("!BBHHH", kind, code, 0, identity, 1) + payload, 2)


def arp(*, operation: int = 1, sender_mac: str = GUEST_MAC, sender: str = GUEST_ADDRESS, asked: str) -> bytes:
    head = struct.pack("!HHBBH", 1, IPV4, 6, 4, operation)
    return head + _mac(sender_mac) + socket.inet_aton(sender) + bytes(6) + socket.inet_aton(asked)


def tcp_frame(target: str, port: int, **fields: int) -> bytes:
    return ethernet(ip(tcp(target, port, **fields), target, protocol=socket.IPPROTO_TCP))


def udp_frame(target: str, port: int, *, source_port: int = 40000, payload: bytes = b"x") -> bytes:
    datagram = udp(target, port, source_port=source_port, payload=payload)
    return ethernet(ip(datagram, target, protocol=socket.IPPROTO_UDP))


def icmp_frame(target: str, *, identity: int = 1, kind: int = ECHO) -> bytes:
    return ethernet(ip(icmp(kind=kind, identity=identity), target, protocol=socket.IPPROTO_ICMP))


@dataclass(frozen=True, kw_only=True)
class Packet:
    """A captured IPv4 packet."""

    protocol: int
    source: str
    target: str
    body: bytes

    @property
    def port(self) -> int | None:
        return int.from_bytes(self.body[2:4], "big") if self.protocol in (6, 17) else None

    @property
    def answer(self) -> str | None:
        """What a refusal looks like to the one who is refused."""
        if self.protocol == socket.IPPROTO_TCP and self.body[13] & RST:
            return "reset"
        if self.protocol == socket.IPPROTO_ICMP and self.body[0] == UNREACHABLE:
            return {PORT_UNREACHABLE: "port-unreachable", ADMIN_PROHIBITED: "admin-prohibited"}.get(
                self.body[1], "other"
            )
        return None


def read_packet(frame: bytes) -> Packet | None:
    if len(frame) < 34 or frame[12:14] != struct.pack("!H", IPV4):
        return None
    head = (frame[14] & 15) * 4
    return Packet(
        protocol=frame[23],
        source=socket.inet_ntoa(frame[26:30]),
        target=socket.inet_ntoa(frame[30:34]),
        body=frame[14 + head :],
    )


def _pseudo(source: str, target: str, protocol: int, length: int) -> bytes:
    return socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!BBH", 0, protocol, length)


def _with_checksum(data: bytes, offset: int, *, pseudo: bytes = b"") -> bytes:
    summed = pseudo + data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(summed) // 2}H", summed))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return data[:offset] + struct.pack("!H", ~total & 0xFFFF) + data[offset + 2 :]


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


ROUTER, GUEST = ROUTER_ADDRESS, GUEST_ADDRESS
