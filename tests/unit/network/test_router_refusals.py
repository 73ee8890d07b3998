"""What is always refused, how a program inside hears of it, and what the node sees of it."""

from __future__ import annotations

import os
import socket
import struct
import time
from ipaddress import IPv4Address

import pytest

import packets
from cpuos.node.network.conntrack import read_flows
from cpuos.node.network.log_sockets import open_end_socket, open_log_socket
from cpuos.node.network.rules import LOG_GROUP
from cpuos.node.network.surroundings import Surroundings
from cpuos.types.blocked import ALWAYS_BLOCKED, BLOCKED_PORTS, Exemption
from router_world import PLAN, RouterWorld, router_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

WEB, HOST, MIRROR = "93.184.215.14", "80.90.100.10", "10.77.0.5"
EXEMPTIONS = [
    Exemption(name="mirror.test", address=IPv4Address(MIRROR), port=8081),
    Exemption(name="time.test", address=IPv4Address(MIRROR), port=123, protocol="udp"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    with router_world(folder, exemptions=EXEMPTIONS, surroundings=Surroundings(addresses=(IPv4Address(HOST),))) as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(world):
    world.apply("internet")
    world.fresh()


@pytest.mark.parametrize("blocked", ALWAYS_BLOCKED, ids=lambda blocked: str(blocked.network))
def test_nothing_of_a_blocked_range_is_reached(world, blocked):
    """Its ends and what lies between, by every protocol; each is answered."""
    world.apply({"allow": [str(blocked.network), "0.0.0.0/0"]})
    network = blocked.network
    addresses = {network[0], network[-1], network[network.num_addresses // 3]}
    before = world.router.counters()
    for address in map(str, addresses):
        world.send(packets.tcp_frame(address, 80), packets.udp_frame(address, 80), packets.icmp_frame(address))
    assert world.arrived() == []
    after = world.router.counters()
    assert after.allowed == before.allowed
    # The kernel itself drops packets to places that no host may have (RFC 1122), before any rule.
    if network.network_address not in _NOWHERE:
        assert after.refused - before.refused == 3 * len(addresses)
        heard = [packet.answer for packet in world.answers(3 * len(addresses))]
        assert sorted(heard) == sorted(["reset", "port-unreachable", "admin-prohibited"] * len(addresses))


_NOWHERE = {IPv4Address(text) for text in ("0.0.0.0", "127.0.0.0", "224.0.0.0", "240.0.0.0")}


@pytest.mark.parametrize("address", ["9.255.255.255", "11.0.0.0", "169.253.255.255", "172.32.0.0", "168.63.129.17"])
def test_the_neighbours_of_blocked_ranges_are_reached(world, address):
    world.send(packets.tcp_frame(address, 80))
    assert [packet.target for packet in world.arrived()] == [address]


@pytest.mark.parametrize("port", BLOCKED_PORTS)
def test_mail_does_not_leave(world, port):
    assert world.connect(WEB, port) == "Connection refused"
    world.send(packets.udp_frame(WEB, port))
    assert [packet.protocol for packet in world.arrived()] == [17]


@pytest.mark.parametrize("port", [22, 80, 443, 8080])
def test_the_hosts_own_addresses_are_refused(world, port):
    assert world.connect(HOST, port) == "Connection refused"
    assert world.arrived() == []


def test_an_exception_lifts_the_block_of_one_service(world):
    with world.server(8081):
        assert world.connect(MIRROR, 8081) == "connected"
        assert world.connect(MIRROR, 8082) == "Connection refused"
        world.fresh()
        world.send(packets.udp_frame(MIRROR, 8081), packets.udp_frame(MIRROR, 123), packets.icmp_frame(MIRROR))
        assert [packet.port for packet in world.arrived()] == [123]


def test_an_exception_does_not_overrule_a_policy(world):
    with world.server(8081):
        for policy in ("off", {"allow": [WEB]}, {"deny": [MIRROR]}):
            world.apply(policy)
            assert world.connect(MIRROR, 8081) == "Connection refused"
        world.apply({"allow": [f"{MIRROR}:8081"]})
        assert world.connect(MIRROR, 8081) == "connected"


@pytest.mark.parametrize("address", [WEB, "169.254.169.254"])
def test_refusals_are_heard_at_once(world, address):
    """Each of many: a program that hears nothing waits for seconds."""
    world.apply({"deny": [WEB]})
    started = time.monotonic()
    for _ in range(120):
        assert world.connect(address, 8080) == "Connection refused"
        with world.guest_socket(socket.SOCK_DGRAM) as one:
            one.connect((address, 4000))
            one.send(b"x")
            with pytest.raises(ConnectionRefusedError):
                one.recv(1)
    assert time.monotonic() - started < 30


def test_counters_hold_every_packet_and_the_log_says_the_rule(world):
    """The log of refusals has a limit; together with the counters nothing is lost."""
    world.apply({"deny": ["1.1.1.1"]}, version=7)
    with open_log_socket(world.router_path) as log:
        before = world.router.counters()
        for port in range(1000, 1300):
            world.send(packets.tcp_frame("1.1.1.1", port))
        world.send(packets.tcp_frame(WEB, 80), packets.udp_frame(WEB, 80), packets.icmp_frame(WEB))
        world.settle()
        after = world.router.counters()
        entries = read_log(log)
    assert after.refused - before.refused == 300
    assert after.allowed - before.allowed == 3
    assert [prefix for prefix, _ in entries].count("a 7") == 3
    assert 50 <= [prefix for prefix, _ in entries].count("d 7") <= 100
    prefix, packet = entries[0]
    assert (prefix, packet.target, packet.port) == ("d 7", "1.1.1.1", 1000)


def test_the_log_has_the_original_destination_of_what_the_policy_refuses(world):
    world.apply({"allow": ["one.test"]}, version=3)
    with open_log_socket(world.router_path) as log:
        world.send(packets.tcp_frame(WEB, 443))
        world.settle()
        assert [(prefix, packet.target, packet.port) for prefix, packet in read_log(log)] == [("d 3", WEB, 443)]


def test_only_one_reads_the_log(world):
    with open_log_socket(world.router_path), pytest.raises(OSError):
        open_log_socket(world.router_path)
    open_log_socket(world.router_path).close()


def test_ends_of_connections_are_told_with_their_bytes(world):
    with open_end_socket(world.router_path) as ends:
        world.send(packets.udp_frame(WEB, 4000, payload=bytes(100)))
        world.settle()
        world.fresh()
        [flow] = [flow for flow in read_flows(ends.recv(1 << 16)) if flow.port == 4000]
    assert (flow.protocol, str(flow.address), flow.bytes_sent, flow.bytes_received) == ("udp", WEB, 128, 0)


def test_the_peek_reaches_what_the_policy_allows_and_nothing_else(world):
    """It reads what guests wrote: overcome, it gets no further than the guest itself."""
    world.apply({"allow": ["one.test", "1.2.3.4"]})
    listener = world.in_guest(lambda: socket.create_server(("10.0.0.2", 1)))
    with world.server(8081), world.server(443), listener:
        before = world.router.counters()
        assert dial(world, "1.2.3.4", 8081) == "connected"
        for address, port in ((WEB, 443), (MIRROR, 8081), ("169.254.169.254", 443), (HOST, 443), ("10.0.0.2", 1)):
            assert dial(world, address, port) == "Connection refused", address
        after = world.router.counters()
        assert (after.dialled - before.dialled, after.undialled - before.undialled) == (1, 5)


def test_a_socket_of_the_node_reaches_the_guest_and_nothing_else(world):
    listener = world.in_guest(lambda: socket.create_server(("10.0.0.2", 1)))
    with listener, world.server(8081):
        world.in_router(lambda: socket.create_connection(("10.0.0.2", 1), 2)).close()
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with world.in_router(lambda kind=kind: socket.socket(socket.AF_INET, kind)) as own:
                own.settimeout(2)
                with pytest.raises(OSError):
                    _say(own, (WEB, 8081))
    assert world.arrived() == []


def _say(one: socket.socket, address: tuple[str, int]) -> None:
    one.connect(address)
    one.send(b"x")
    one.recv(1)


def test_the_guest_hears_the_forwarder_and_no_other_port(world):
    with world.in_router(lambda: socket.create_server(("10.0.0.1", 9999))):
        assert world.connect("10.0.0.1", 9999) == "Connection refused"
    with world.guest_socket(socket.SOCK_DGRAM) as one:
        one.sendto(b"question", ("10.0.0.1", 53))
        question, who = world.names.recvfrom(100)
        world.names.sendto(question, who)
        assert one.recv(100) == b"question"
    with world.in_router(lambda: socket.create_server(("10.0.0.1", 53))):
        assert world.connect("10.0.0.1", 53) == "connected"
    assert world.connect("10.0.0.1", 53) == "Connection refused"
    assert world.connect(str(PLAN.address), 53) == "Connection refused"


def dial(world: RouterWorld, address: str, port: int) -> str:
    [made] = world.router.peek_sockets(1)
    with made:
        made.settimeout(20)
        try:
            made.connect((address, port))
        except OSError as problem:
            return os.strerror(problem.errno) if problem.errno else type(problem).__name__
        return "connected"


def read_log(log: socket.socket) -> list[tuple[str, packets.Packet]]:
    """(prefix, packet) of each entry (linux/netfilter/nfnetlink_log.h)."""
    entries = []
    while True:
        try:
            data = log.recv(1 << 16)
        except BlockingIOError:
            return entries
        offset = 0
        while offset < len(data):
            length, kind = struct.unpack_from("=IH", data, offset)
            if kind == 4 << 8:
                assert struct.unpack_from("!H", data, offset + 18)[0] == LOG_GROUP
                values = dict(_attributes(data[offset + 20 : offset + length]))
                packet = packets.read_packet(bytes(12) + b"\x08\0" + values[9])
                assert packet
                entries.append((values[10].rstrip(b"\0").decode(), packet))
            offset += (length + 3) & ~3


def _attributes(data: bytes):
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        yield kind & 0x3FFF, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3
