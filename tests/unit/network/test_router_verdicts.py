"""The kernel's rules say what the judge says: of policies by chance, for each of a hundred destinations."""

from __future__ import annotations

import os
import socket
from ipaddress import IPv4Address

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import packets
import policies
from cpuos.node.network.judge import Judge, Passage
from cpuos.node.network.policy_rules import NamedAddress
from cpuos.node.network.rules import GUEST_FLOW
from cpuos.node.network.surroundings import Surroundings
from cpuos.types.blocked import ALWAYS_BLOCKED, Exemption, blocked_reason
from router_world import RouterWorld, judge, router_world

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="needs root"), pytest.mark.timeout(300)]

HOST = IPv4Address("80.90.100.10")
MIRROR = IPv4Address("10.77.0.5")
EXEMPTIONS = (Exemption(name="b.test", address=MIRROR, port=443), Exemption(name="a.test", address=HOST, port=25))
ADDRESSES = (*policies.PUBLIC, HOST, MIRROR, IPv4Address("10.20.30.40"), IPv4Address("169.254.169.254"))
DESTINATIONS = [
    *((address, "tcp", port) for address in ADDRESSES for port in policies.PORTS),
    *((address, "udp", port) for address in ADDRESSES for port in policies.PORTS),
    *((address, "icmp", None) for address in ADDRESSES),
]
FRAMES = [
    packets.icmp_frame(str(address))
    if port is None
    else (packets.tcp_frame if protocol == "tcp" else packets.udp_frame)(str(address), port)
    for address, protocol, port in DESTINATIONS
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    with router_world(folder, exemptions=EXEMPTIONS, surroundings=Surroundings(addresses=(HOST,))) as made:
        yield made


def kernel_verdicts(world: RouterWorld) -> tuple[dict, set]:
    """Of every destination, and what arrived outside."""
    world.send(*FRAMES)
    arrived = {(IPv4Address(packet.target), packet.protocol, packet.port) for packet in world.arrived()}
    verdicts = dict.fromkeys(DESTINATIONS, Passage.REFUSED)
    for flow in world.router.flows():
        if flow.mark == GUEST_FLOW:
            peeked = str(flow.answered_by) == packets.ROUTER
            verdicts[flow.address, flow.protocol, flow.port] = Passage.PEEKED if peeked else Passage.DIRECT
    return verdicts, arrived


def judged(one: Judge, learned: list[NamedAddress]) -> dict:
    names: dict[IPv4Address, set[str]] = {}
    for entry in learned:
        names.setdefault(entry.address, set()).add(entry.name)
    verdicts = {}
    for address, protocol, port in DESTINATIONS:
        blocked = blocked_reason(address, protocol=protocol, port=port, exemptions=EXEMPTIONS, host_addresses=[HOST])
        known = names.get(address, ())
        passage = one.passage(address, protocol=protocol, port=port, names=known)
        verdicts[address, protocol, port] = Passage.REFUSED if blocked else passage
    return verdicts


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layers=policies.layers(), learned=policies.learned(), at_once=st.booleans())
def test_kernel_and_judge_agree(world, layers, learned, at_once):
    one = judge(*layers)
    world.fresh()
    world.router.apply(one, learned=learned if at_once else ())
    if not at_once:
        for entry in learned:
            world.router.learn([entry])
    before = world.router.counters()
    verdicts, arrived = kernel_verdicts(world)
    after = world.router.counters()
    expected = judged(one, learned)
    assert verdicts == expected, layers
    numbers = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP, "icmp": socket.IPPROTO_ICMP}
    assert arrived == {
        (address, numbers[protocol], port)
        for (address, protocol, port), passage in expected.items()
        if passage is Passage.DIRECT
    }
    said = list(expected.values())
    assert after.allowed - before.allowed == said.count(Passage.DIRECT)
    assert after.peeked - before.peeked == said.count(Passage.PEEKED)
    assert after.refused - before.refused == said.count(Passage.REFUSED)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layers=policies.layers(), data=st.data())
def test_no_policy_opens_what_is_always_blocked(world, layers, data):
    """Whatever is allowed, and whatever names are answered with."""
    addresses = data.draw(st.lists(st.one_of([_inside(blocked.network) for blocked in ALWAYS_BLOCKED]), min_size=8))
    addresses = [address for address in addresses if address not in (MIRROR, IPv4Address("10.0.0.1"))]
    learned = [NamedAddress(name=name, address=address, ttl_s=300) for name in policies.NAMES for address in addresses]
    world.fresh()
    world.router.apply(judge(*layers), learned=learned)
    for address in map(str, addresses):
        port = data.draw(st.integers(1, 65535))
        world.send(packets.tcp_frame(address, port), packets.udp_frame(address, port), packets.icmp_frame(address))
    assert world.arrived() == []
    assert [flow for flow in world.router.flows() if flow.mark == GUEST_FLOW] == []


def _inside(network) -> st.SearchStrategy[IPv4Address]:
    return st.integers(int(network[0]), int(network[-1])).map(IPv4Address)
