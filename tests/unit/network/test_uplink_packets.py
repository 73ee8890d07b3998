"""What the uplink reads of packets that a guest made, and the packets that it writes."""

from __future__ import annotations

import os
import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.node.network.uplink.guard import Guard
from cpuos.node.network.uplink.packets import (
    ACCEPTED,
    PORT_UNREACHABLE,
    Packet,
    echo_packet,
    parse_packet,
    tagged,
    udp_packet,
    unreachable,
)
from cpuos.types.blocked import Exemption

SLOT, FAR = IPv4Address("10.231.0.9"), IPv4Address("93.184.215.14")
SYN, ACK = 0x02, 0x10


def checksum(data: bytes) -> int:
    """RFC 1071 in words; 0 over what carries a right one."""
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total >> 16) + (total & 0xFFFF)
    return total ^ 0xFFFF


def ip(protocol: int, body: bytes, *, options: bytes = b"", fragment: int = 0, total: int | None = None) -> bytes:
    words = 5 + len(options) // 4
    length = total if total is not None else words * 4 + len(body)
    head = struct.pack("!BBHHHBBH4s4s", 0x40 | words, 0, length, 1, fragment, 64, protocol, 0, SLOT.packed, FAR.packed)
    return head + options + body


def tcp(flags: int = SYN, port: int = 443) -> bytes:
    return struct.pack("!HHIIBBHHH", 40000, port, 1, 0, 0x50, flags, 1000, 0, 0)


def udp(payload: bytes = b"hello", *, length: int | None = None) -> bytes:
    return struct.pack("!HHHH", 40000, 53, 8 + len(payload) if length is None else length, 0) + payload


def echo(kind: int = 8) -> bytes:
    return struct.pack("!BBHHH", kind, 0, 0, 77, 5) + b"payload"


def parsed(data: bytes) -> Packet:
    packet = parse_packet(data)
    assert packet is not None
    return packet


def test_what_is_read():
    one = parsed(ip(6, tcp()))
    assert (one.source, one.address, one.port) == (SLOT.packed, FAR, 443)
    assert one.key == SLOT.packed + FAR.packed + struct.pack("!HH", 40000, 443)
    assert parsed(ip(6, tcp(), options=b"\1\1\1\1")).key == one.key
    assert parsed(ip(17, udp())).payload == b"hello"
    assert parsed(ip(17, udp(length=10))).payload == b"he", "what a datagram does not count is padding"
    assert parsed(ip(1, echo())).payload == echo()
    assert parsed(ip(17, udp()) + b"padding").payload == b"hello"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        ip(6, tcp(ACK)),
        ip(6, tcp(SYN | ACK)),
        ip(6, tcp())[:39],
        ip(6, tcp(), total=60),
        ip(6, tcp(), total=20),
        ip(6, tcp(), fragment=0x2000),
        ip(17, udp(), fragment=1),
        ip(17, udp(length=7)),
        ip(17, udp(length=14)),
        ip(1, echo(0)),
        ip(1, echo(13)),
        ip(47, bytes(20)),
        b"\x60" + ip(17, udp())[1:],
        b"\x41" + ip(17, udp())[1:],
        b"\x4f" + ip(17, udp())[1:],
    ],
)
def test_what_is_none_of_its_business(data):
    assert parse_packet(data) is None


@given(st.binary(max_size=120) | st.binary(max_size=80).map(lambda tail: b"\x45" + tail))
def test_nothing_breaks_it(data):
    packet = parse_packet(data)
    if packet is not None:
        for wire in (tagged(packet, ACCEPTED), unreachable(packet, PORT_UNREACHABLE), udp_packet(packet, b"x")):
            assert checksum(wire[: (wire[0] & 15) * 4]) == 0


def test_a_tag_changes_nothing_else():
    packet = parsed(ip(6, tcp(), options=b"\1\1\1\1"))
    wire = tagged(packet, ACCEPTED)
    assert wire[1] == ACCEPTED << 2
    assert (wire[0:1], wire[2:10], wire[12:]) == (packet.data[0:1], packet.data[2:10], packet.data[12:])


@given(st.binary(max_size=2000))
def test_an_answer_to_a_datagram(payload):
    wire = udp_packet(parsed(ip(17, udp())), payload)
    assert (wire[12:16], wire[16:20], wire[9]) == (FAR.packed, SLOT.packed, 17)
    assert struct.unpack("!HHH", wire[20:26]) == (53, 40000, 8 + len(payload))
    assert wire[28:] == payload
    assert checksum(wire[12:20] + struct.pack("!HH", 17, len(wire) - 20) + wire[20:]) == 0


def test_an_answer_to_an_echo_has_the_guests_identifier_and_an_error_what_it_is_about():
    request = parsed(ip(1, echo()))
    wire = echo_packet(request, struct.pack("!BBHHH", 0, 0, 0, 9999, 5) + b"payload")
    assert struct.unpack("!BBxxHH", wire[20:28]) == (0, 0, 77, 5)
    assert (wire[28:], checksum(wire[20:])) == (b"payload", 0)
    datagram = parsed(ip(17, udp()))
    wire = unreachable(datagram, PORT_UNREACHABLE)
    assert (wire[20], wire[21], checksum(wire[20:])) == (3, PORT_UNREACHABLE, 0)
    assert wire[28:] == datagram.data[:28]


def test_more_than_a_packet_holds_is_not_sent():
    assert udp_packet(parsed(ip(17, udp())), bytes(65535)) == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_guard(sealed):
    exemption = Exemption(name="mirror.example", address=IPv4Address("10.77.0.5"), port=8080)

    def judge() -> list[bool]:
        guard = Guard(exemptions=[exemption], host_addresses=[IPv4Address("93.184.215.99")])
        places = [("93.184.215.14", 80), ("93.184.215.99", 80), ("10.77.0.5", 8080), ("10.77.0.5", 80)]
        places += [
            ("80.90.100.10", 80),
            ("80.90.100.255", 80),
            ("127.0.0.1", 80),
            ("0.0.0.0", 80),
            ("93.184.215.14", 25),
        ]
        try:
            return [guard.allows(IPv4Address(place), protocol="tcp", port=port) for place, port in places]
        finally:
            guard.close()

    assert sealed.in_host(judge) == [True, False, True, False, False, False, False, False, False]
    way = sealed.run_in_host(["ip", "-4", "route", "show", "default"]).stdout.split()
    sealed.run_in_host(["ip", "route", "del", "default"])
    try:
        assert sealed.in_host(judge)[0] is False, "there is no way"
    finally:
        sealed.run_in_host(["ip", "route", "add", *way])
