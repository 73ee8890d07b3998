"""The connection table, read from the kernel's messages."""

from __future__ import annotations

import os
import socket
import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

import packets
from cpuos.node.network.conntrack import ConntrackSocket, flow_key, read_flows
from cpuos.node.network.nftables import NftContext
from router_world import router_world

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def ends(source: str, target: str, protocol: int, *ports: int) -> bytes:
    addresses = attribute(1, socket.inet_aton(source)) + attribute(2, socket.inet_aton(target))
    numbers = attribute(1, bytes([protocol]))
    for kind, port in enumerate(ports, 2):
        numbers += attribute(kind, struct.pack("!H", port))
    return attribute(1 | 0x8000, addresses) + attribute(2 | 0x8000, numbers)


def message(*attributes: bytes, kind: int = 0x100) -> bytes:
    body = struct.pack("=BBH", socket.AF_INET, 0, 0) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body


ONE = message(
    attribute(1 | 0x8000, ends("10.0.0.2", "1.2.3.4", 6, 40000, 443)),
    attribute(2 | 0x8000, ends("10.0.0.1", "10.0.0.2", 6, 8443, 40000)),
    attribute(8, struct.pack("!I", 1)),
    attribute(9 | 0x8000, attribute(1, struct.pack("!Q", 3)) + attribute(2, struct.pack("!Q", 1234))),
    attribute(10 | 0x8000, attribute(2, struct.pack("!Q", 5678))),
    attribute(12, struct.pack("!I", 77)),
)


def test_reads_a_connection():
    [flow] = read_flows(ONE)
    assert (flow.protocol, flow.source, flow.source_port) == ("tcp", IPv4Address("10.0.0.2"), 40000)
    assert (flow.address, flow.port, flow.answered_by) == (IPv4Address("1.2.3.4"), 443, IPv4Address("10.0.0.1"))
    assert (flow.mark, flow.bytes_sent, flow.bytes_received) == (1, 1234, 5678)
    assert flow.key.endswith(attribute(12, struct.pack("!I", 77)))


def test_reads_what_has_no_ports_or_counters():
    ping = ends("10.0.0.2", "1.2.3.4", 1), ends("1.2.3.4", "10.0.0.2", 1)
    other = ends("10.0.0.2", "1.2.3.4", 47), ends("1.2.3.4", "10.0.0.2", 47)
    data = b"".join(message(attribute(1 | 0x8000, there), attribute(2 | 0x8000, back)) for there, back in (ping, other))
    assert [(flow.protocol, flow.port, flow.mark, flow.bytes_sent) for flow in read_flows(data)] == [
        ("icmp", None, 0, 0),
        ("47", None, 0, 0),
    ]


def test_leaves_out_other_messages():
    assert [flow.port for flow in read_flows(message(kind=3) + ONE + message() + message(kind=2))] == [443]
    assert list(read_flows(message(kind=0x501))) == []


@given(st.integers(0, len(ONE)), st.binary(max_size=40))
def test_a_message_cut_short_ends_the_reading(length, more):
    """The kernel sends none; whoever else reads must not hang or crash on it."""
    try:
        list(read_flows(ONE[:length] + more))
    except (ValueError, KeyError, IndexError, struct.error):
        pass


@needs_root
def test_dump_and_delete(tmp_path):
    with router_world(tmp_path) as world, world.in_router(ConntrackSocket) as table:
        world.apply("internet")
        assert (table.count(), table.flows()) == (0, [])
        world.send(*(packets.udp_frame("93.184.215.14", port) for port in range(1000, 3000)))
        world.send(packets.icmp_frame("93.184.215.14", identity=9))
        world.settle()
        assert table.count() == 2002, "the question that ended the wait, too"
        flows = [flow for flow in table.flows() if flow.mark]
        assert {flow.port for flow in flows} == {*range(1000, 3000), None}
        assert len(flows) == 2001
        assert table.delete(flows[0]) is True
        assert table.delete(flows[0]) is False
        assert len([flow for flow in table.flows() if flow.mark]) == 2000


@needs_root
def test_dump_of_one_source_and_delete_by_key(tmp_path):
    """Of a hub's table, one slot's: without reading those of all others."""
    with router_world(tmp_path) as world, world.in_outside(ConntrackSocket) as table:
        world.apply("internet")
        world.in_outside(track)
        world.send(*(packets.udp_frame("93.184.215.14", port) for port in range(1000, 1005)))
        world.settle()
        assert {flow.port for flow in table.flows(source=world.address)} == set(range(1000, 1005))
        assert table.flows(source=IPv4Address("10.0.0.2")) == []
        key = flow_key("udp", world.address, 40000, address=IPv4Address("93.184.215.14"), port=1001)
        assert (table.delete_key(key), table.delete_key(key)) == (True, False)
        assert {flow.port for flow in table.flows(source=world.address)} == {1000, 1002, 1003, 1004}


def track() -> None:
    """Connections are tracked where a rule asks for their state, and kept where they are let in."""
    context = NftContext()
    context.run("table ip t { chain c { type filter hook input priority -1; ct state new accept; }; }")
    context.run("add element ip outside served { 1000, 1001, 1002, 1003, 1004 }")
    context.close()
