"""A hostile writer in the place of the sentry: of all that it puts on the wire, only what the policy allows leaves."""

from __future__ import annotations

import os
import socket
import struct
import subprocess

import pytest

import packets
from cpuos.node.network.namespaces import set_sysctls
from cpuos.node.network.plan import HUB_MAC, WAN_MAC
from packets import ROUTER, arp, ethernet, icmp, ip, tcp, udp
from router_world import PLAN, packet_socket, router_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

WEB, OTHER_MAC = "93.184.215.14", "02:00:0a:00:00:99"
BROADCAST = "ff:ff:ff:ff:ff:ff"
GOOD = ip(tcp(WEB, 80), WEB, protocol=6)
LOOSE_ROUTE = bytes([131, 7, 4]) + bytes([10, 20, 30, 40]) + b"\0"


@pytest.fixture(scope="module", params=["veth", "tap"])
def world(request, tmp_path_factory):
    with router_world(tmp_path_factory.mktemp("world"), tap=request.param == "tap") as made:
        made.apply("internet")
        yield made


@pytest.fixture(autouse=True)
def _fresh(world):
    world.fresh()


def test_no_route_leaves_this_world(world):
    """Before all else: whatever a broken rule lets through, nobody is there."""
    devices = {name for _, name in world.in_outside(socket.if_nameindex)}
    assert devices == {"lo", PLAN.hub_device}
    routes = _show(world.outside_path, "route")
    assert routes.split()[:3] == [str(PLAN.address), "dev", PLAN.hub_device]
    assert len(routes.splitlines()) == 1


def test_an_honest_packet_leaves(world):
    """So that the tests below could fail."""
    before = world.router.counters()
    world.send(ethernet(GOOD), packets.udp_frame(WEB, 4000), packets.icmp_frame(WEB))
    arrived = world.arrived()
    assert [(packet.source, packet.target) for packet in arrived] == [(str(PLAN.address), WEB)] * 3
    assert [packet.protocol for packet in arrived] == [6, 17, 1]
    after = world.router.counters()
    assert (after.allowed - before.allowed, after.refused - before.refused) == (3, 0)


FORGED = {
    "the router's MAC": ethernet(GOOD, source=packets.ROUTER_MAC),
    "another MAC": ethernet(GOOD, source=OTHER_MAC),
    "to a broadcast MAC": ethernet(GOOD, target=BROADCAST),
    "to another MAC": ethernet(GOOD, target=OTHER_MAC),
    "the router's address": ethernet(ip(tcp(WEB, 80, source=ROUTER), WEB, protocol=6, source=ROUTER)),
    "a neighbour's address": ethernet(ip(udp(WEB, 80, source="10.0.0.3"), WEB, protocol=17, source="10.0.0.3")),
    "the slot's address": ethernet(
        ip(udp(WEB, 80, source=str(PLAN.address)), WEB, protocol=17, source=str(PLAN.address))
    ),
    "a public address": ethernet(ip(udp(WEB, 80, source="8.8.8.8"), WEB, protocol=17, source="8.8.8.8")),
    "no address": ethernet(ip(udp(BROADCAST_IP := "255.255.255.255", 67, source="0.0.0.0"), BROADCAST_IP, protocol=17,
                              source="0.0.0.0")),
    "IP options": ethernet(ip(tcp(WEB, 80), WEB, protocol=6, options=LOOSE_ROUTE)),
    "IP options, padding": ethernet(ip(tcp(WEB, 80), WEB, protocol=6, options=b"\x01\x01\x01\x00")),
    "IPv6 as IPv4": ethernet(ip(tcp(WEB, 80), WEB, protocol=6, version=6)),
    "IPv6": ethernet(b"\x60" + bytes(39), kind=packets.IPV6),
    "an IPv6 router advertisement": ethernet(
        b"\x60\0\0\0\0\x10\x3a\xff" + bytes(31) + b"\x01\x86" + bytes(15), kind=packets.IPV6, target="33:33:00:00:00:01"
    ),
    "VLAN": ethernet(struct.pack("!HH", 5, packets.IPV4) + GOOD, kind=0x8100),
    "VLAN 0": ethernet(struct.pack("!HH", 0, packets.IPV4) + GOOD, kind=0x8100),
    "QinQ": ethernet(struct.pack("!HHHH", 5, 0x8100, 6, packets.IPV4) + GOOD, kind=0x88A8),
    "MPLS": ethernet(struct.pack("!I", 16 << 12 | 1 << 8 | 64) + GOOD, kind=0x8847),
    "PPPoE": ethernet(b"\x11\0\0\1" + struct.pack("!HH", len(GOOD) + 2, 0x21) + GOOD, kind=0x8864),
    "802.3 with LLC": ethernet(b"\x42\x42\x03" + bytes(35), kind=38),
    "a frame of nothing": ethernet(b"", kind=packets.IPV4),
    "ARP as another": ethernet(arp(asked=ROUTER, sender="10.0.0.3"), kind=packets.ARP, target=BROADCAST),
    "ARP as the router": ethernet(arp(asked=ROUTER, sender=ROUTER), kind=packets.ARP, target=BROADCAST),
    "ARP with another MAC inside": ethernet(arp(asked=ROUTER, sender_mac=OTHER_MAC), kind=packets.ARP),
    "ARP for the uplink": ethernet(arp(asked=str(PLAN.hub_address)), kind=packets.ARP, target=BROADCAST),
    "ARP answer nobody asked for": ethernet(arp(operation=2, asked=ROUTER, sender_mac=OTHER_MAC), kind=packets.ARP),
    "gratuitous ARP": ethernet(arp(asked=packets.GUEST, operation=2), kind=packets.ARP, target=BROADCAST),
    "RARP": ethernet(arp(asked=ROUTER, operation=3), kind=0x8035),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_frames_are_dropped_and_counted(world, name):
    neighbours = _neighbours(world)
    before = world.router.counters()
    world.send(FORGED[name])
    assert world.arrived() == []
    after = world.router.counters()
    assert after.forged - before.forged == 1
    assert (after.allowed, after.refused) == (before.allowed, before.refused)
    assert _neighbours(world) == neighbours


# No answer: the kernel sends none for protocols without a check sum that it knows.
STRANGE = {
    "IPIP": (ethernet(ip(GOOD, WEB, protocol=4)), None),
    "GRE": (ethernet(ip(b"\0\0\x08\0" + GOOD, WEB, protocol=47)), "admin-prohibited"),
    "IPv6 in IPv4": (ethernet(ip(b"\x60" + bytes(39), WEB, protocol=41)), None),
    "ESP": (ethernet(ip(bytes(24), WEB, protocol=50)), "admin-prohibited"),
    "UDP-Lite": (ethernet(ip(udp(WEB, 80), WEB, protocol=136)), "admin-prohibited"),
    "IGMP": (ethernet(ip(b"\x16\0\0\0\xe0\0\0\xfb", WEB, protocol=2)), None),
    "protocol 255": (ethernet(ip(bytes(24), WEB, protocol=255)), "admin-prohibited"),
    "ICMP time stamp": (ethernet(ip(icmp(kind=13, payload=bytes(12)), WEB, protocol=1)), "admin-prohibited"),
    "TCP to itself": (ethernet(ip(tcp(packets.GUEST, 80), packets.GUEST, protocol=6)), "reset"),
    "the router's own ports": (ethernet(ip(tcp(ROUTER, 22), ROUTER, protocol=6)), "reset"),
    "the peek's port": (ethernet(ip(tcp(ROUTER, 8443), ROUTER, protocol=6)), "reset"),
    "the router's UDP": (ethernet(ip(udp(ROUTER, 123), ROUTER, protocol=17)), "port-unreachable"),
    "a ping of the router": (ethernet(ip(icmp(), ROUTER, protocol=1)), "admin-prohibited"),
    "the slot's own address": (ethernet(ip(tcp(str(PLAN.address), 80), str(PLAN.address), protocol=6)), "reset"),
    "the next hop": (ethernet(ip(tcp(str(PLAN.hub_address), 80), str(PLAN.hub_address), protocol=6)), "reset"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_ordinary_connection_is_refused_at_once(world, name):
    frame, answer = STRANGE[name]
    before = world.router.counters()
    world.send(frame)
    assert world.arrived() == []
    assert world.router.counters().refused - before.refused == 1
    assert [packet.answer for packet in world.answers(1 if answer else 0)] == ([answer] if answer else [])


STRAY = {
    "a bare ACK": packets.ACK,
    "a SYN-ACK": packets.SYN | packets.ACK,
    "a FIN": packets.FIN | packets.ACK,
    "all flags": 63,
    "no flags": 0,
    "SYN and FIN": packets.SYN | packets.FIN,
    "a reset": packets.RST,
}


@pytest.mark.parametrize("name", STRAY)
@pytest.mark.parametrize("target", [WEB, ROUTER])
def test_a_connection_begins_with_a_bare_syn(world, name, target):
    before = world.router.counters()
    world.send(packets.tcp_frame(target, 53, flags=STRAY[name]))
    assert world.arrived() == []
    after = world.router.counters()
    assert (after.stray - before.stray) + (after.refused - before.refused) == 1
    assert after.allowed == before.allowed
    # Nothing answers a reset (RFC 9293, 3.5.2).
    assert [packet.answer for packet in world.answers(1)] == ([] if STRAY[name] & packets.RST else ["reset"])


@pytest.mark.parametrize("flags", [packets.ACK, packets.SYN | packets.ACK, packets.FIN | packets.ACK])
def test_that_holds_by_the_rules_alone(world, flags):
    """Also on a kernel that takes up connections in their middle."""
    world.in_router(lambda: set_sysctls({"net/netfilter/nf_conntrack_tcp_loose": "1"}))
    try:
        world.send(packets.tcp_frame(WEB, 80, flags=flags))
        assert world.arrived() == []
        assert [packet.answer for packet in world.answers(1)] == ["reset"]
    finally:
        world.in_router(lambda: set_sysctls({"net/netfilter/nf_conntrack_tcp_loose": "0"}))


SILENT = {
    "SCTP that begins with data": ethernet(ip(struct.pack("!HHII", 4000, 80, 0, 0) + bytes(20), WEB, protocol=132)),
    "a fragment without a first one": ethernet(ip(bytes(64), WEB, protocol=17, fragment=100)),
    "a first fragment alone": ethernet(ip(udp(WEB, 80, payload=bytes(64)), WEB, protocol=17, fragment=0x2000)),
    "a tiny first fragment": ethernet(ip(tcp(WEB, 80)[:8], WEB, protocol=6, fragment=0x2000)),
    "ICMP redirect": ethernet(ip(icmp(kind=packets.REDIRECT, code=1, payload=bytes(28)), WEB, protocol=1)),
    "an echo answer nobody asked for": ethernet(ip(icmp(kind=packets.ECHO_ANSWER), WEB, protocol=1)),
    "multicast": ethernet(ip(udp("224.0.0.251", 5353), "224.0.0.251", protocol=17)),
    "broadcast": ethernet(ip(udp("255.255.255.255", 67), "255.255.255.255", protocol=17)),
    "the subnet's broadcast": ethernet(ip(udp("10.0.0.3", 67), "10.0.0.3", protocol=17)),
    "loopback": ethernet(ip(udp("127.0.0.1", 53), "127.0.0.1", protocol=17)),
    "a TCP header that is none": ethernet(ip(bytes(4), WEB, protocol=6)),
    "a wrong length": ethernet(GOOD[:2] + b"\xff\xff" + GOOD[4:]),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_makes_no_sense_goes_nowhere(world, name):
    before = world.router.counters()
    world.send(SILENT[name])
    assert world.arrived() == []
    assert world.router.counters().allowed == before.allowed


def test_fragments_are_judged_as_a_whole(world):
    """An overlapping second fragment must not rewrite a port that was judged."""
    datagram = udp("10.20.30.40", 4000, payload=bytes(64))
    whole = udp(WEB, 4000, payload=bytes(64))
    world.send(
        ethernet(ip(whole[:16], WEB, protocol=17, fragment=0x2000, identity=1)),
        ethernet(ip(whole[16:], WEB, protocol=17, fragment=2, identity=1)),
        ethernet(ip(datagram[:16], "10.20.30.40", protocol=17, fragment=0x2000, identity=2)),
        ethernet(ip(datagram[16:], "10.20.30.40", protocol=17, fragment=2, identity=2)),
    )
    assert {packet.target for packet in world.arrived()} == {WEB}


@pytest.mark.parametrize("hops", [0, 1, 2, 255])
def test_the_guest_does_not_say_how_far_a_packet_goes(world, hops):
    """An end of a connection that only the router saw would be open for days in the tables behind it."""
    world.send(ethernet(ip(tcp(WEB, 4000), WEB, protocol=6, hops=hops)))
    world.send(ethernet(ip(udp(WEB, 4000), WEB, protocol=17, hops=hops)))
    assert [packet.protocol for packet in world.arrived()] == [6, 17]
    world.fresh()


def test_an_icmp_error_goes_out_only_for_a_connection_of_ones_own(world):
    quoted = ip(udp(packets.GUEST, 40000, source=WEB, source_port=4000), packets.GUEST, protocol=17, source=WEB)
    error = ethernet(ip(icmp(kind=packets.UNREACHABLE, code=3, payload=quoted), WEB, protocol=1))
    redirect = ethernet(ip(icmp(kind=packets.REDIRECT, code=1, payload=quoted), WEB, protocol=1))
    too_old = ethernet(ip(icmp(kind=11, payload=quoted), WEB, protocol=1))
    world.send(error, redirect, too_old)
    assert world.arrived() == []
    world.send(packets.udp_frame(WEB, 4000))
    before = world.router.counters()
    world.send(error, redirect, too_old)
    assert [packet.protocol for packet in world.arrived()] == [17, 1]
    after = world.router.counters()
    assert (after.refused, after.stray - before.stray) == (before.refused, 1)


def test_an_icmp_error_about_the_forwarders_answer_is_no_refusal(world):
    """Ordinary: a resolver that closed its socket. It must not look like a try to reach the router."""
    asked = packets.udp_frame(ROUTER, 53, source_port=40001)
    answer = ip(udp(packets.GUEST, 40001, source=ROUTER, source_port=53), packets.GUEST, protocol=17, source=ROUTER)
    world.send(asked)
    before = world.router.counters()
    world.send(ethernet(ip(icmp(kind=packets.UNREACHABLE, code=3, payload=answer), ROUTER, protocol=1)))
    assert world.arrived() == []
    after = world.router.counters()
    assert (after.refused, after.stray - before.stray) == (before.refused, 1)


def test_nothing_comes_in_from_outside(world):
    """Neither to the router nor through it, whatever the addresses."""
    wire = world.in_outside(lambda: packet_socket(PLAN.hub_device))
    with wire:
        world.settle()
        for target in (str(PLAN.address), packets.GUEST, ROUTER):
            for payload, protocol in ((tcp(target, 22, source=WEB), 6), (udp(target, 53, source=WEB), 17), (icmp(), 1)):
                packet = ip(payload, target, protocol=protocol, source=WEB)
                wire.send(ethernet(packet, source=HUB_MAC, target=WAN_MAC))
        world.settle()
    assert [flow for flow in world.router.flows() if str(flow.source) == WEB] == []
    assert WEB not in {packet.source for packet in world.heard()}


def _neighbours(world) -> str:
    return _show(world.router_path, "neigh")


def _show(namespace, what: str) -> str:
    command = ["nsenter", f"--net={namespace}", "ip", what]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
