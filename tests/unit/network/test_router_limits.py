"""Caps of one sandbox: what is over them is refused or dropped, counted, and over with the flood."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
import time

import pytest

import packets
from cpuos.node.network.limits import NetworkLimits
from router_world import AMPLE, router_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

WEB = "93.184.215.14"


@pytest.fixture
def with_limits(tmp_path):
    opened = []

    def make(**limits):
        context = router_world(tmp_path, limits=dataclasses.replace(AMPLE, **limits))
        opened.append(context)
        world = context.__enter__()
        world.apply("internet")
        return world

    yield make
    for context in opened:
        context.__exit__(None, None, None)


def test_concurrent_connections(with_limits):
    world = with_limits(concurrent_connections=20)
    world.send(*(packets.udp_frame(WEB, port) for port in range(1000, 1100)))
    arrived = len(world.arrived())
    assert 20 <= arrived <= 21
    counters = world.router.counters()
    assert (counters.allowed, counters.limited, counters.refused) == (arrived, 100 - arrived, 0)
    assert {packet.answer for packet in world.answers(100 - arrived)} == {"port-unreachable"}
    assert world.connect(WEB, 8080) == "Connection refused"
    world.fresh()  # as if they had timed out
    with world.server(8080):
        assert world.connect(WEB, 8080) == "connected"


def test_peeked_connections_count_too(with_limits):
    world = with_limits(concurrent_connections=20)
    world.apply({"deny": ["bad.test"]})
    opened = [world.guest_socket() for _ in range(40)]
    heard = [one.connect_ex((WEB, 443)) for one in opened]
    counters = world.router.counters()
    assert counters.peeked == heard.count(0) in (20, 21)
    assert counters.limited == 40 - counters.peeked
    opened[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
    opened.pop(0).close()
    world.settle()
    # One has ended, so there is room for one; the kernel counts anew once a tick.
    deadline = time.monotonic() + 30
    while world.connect(WEB, 443) != "connected":
        assert time.monotonic() < deadline
    for one in opened:
        one.close()


def test_new_connections(with_limits):
    world = with_limits(new_connections_per_s=10, new_connections_burst=30)
    began = time.monotonic()
    world.send(*(packets.tcp_frame(WEB, port) for port in range(1000, 1300)))
    arrived = len(world.arrived())
    assert 30 <= arrived <= 50 + 10 * (time.monotonic() - began)
    assert world.router.counters().limited == 300 - arrived


def test_refused_connections_use_up_no_allowance(with_limits):
    world = with_limits(new_connections_per_s=1, new_connections_burst=5)
    world.send(*(packets.tcp_frame("10.9.9.9", port) for port in range(1000, 1300)))
    world.send(*(packets.tcp_frame(WEB, port) for port in range(1000, 1005)))
    assert len(world.arrived()) == 5


def test_names_have_an_allowance_of_their_own(with_limits):
    """A flood of questions ends before the forwarder; one of connections leaves names working."""
    world = with_limits(names_per_s=10, names_burst=20, new_connections_per_s=1, new_connections_burst=1)
    world.send(*(packets.udp_frame(WEB, port) for port in range(1000, 1300)))
    question = packets.udp_frame("10.0.0.1", 53, source_port=6000, payload=b"question")
    began, heard = time.monotonic(), 0
    world.send(*[question] * 300)
    sent_s = time.monotonic() - began
    world.names.settimeout(1)
    while True:
        try:
            heard += world.names.recv(100) == b"question"
        except TimeoutError:
            break
    assert 20 <= heard <= 50 + 10 * sent_s
    assert world.router.counters().names_paced == 300 - heard


def test_names_over_tcp(with_limits):
    world = with_limits()
    listener = world.in_router(lambda: socket.create_server(("10.0.0.1", 53), backlog=256))
    with listener:
        heard = []
        opened = []
        for _ in range(40):
            one = world.guest_socket()
            opened.append(one)
            heard.append(one.connect_ex(("10.0.0.1", 53)))
        for one in opened:
            one.close()
    assert heard.count(0) in (32, 33)
    assert heard[-1] != 0


def test_pings(with_limits):
    world = with_limits(pings_per_s=5)
    began = time.monotonic()
    world.send(*[packets.icmp_frame(WEB)] * 50)
    most = 15 + 5 * (time.monotonic() - began)
    assert 5 <= len(world.arrived()) <= most
    assert world.router.counters().paced >= 50 - most


def test_packets(with_limits):
    """Of a connection that is open, too."""
    world = with_limits(packets_per_s=100)
    began = time.monotonic()
    world.send(*[packets.udp_frame(WEB, 4000)] * 1000)
    most = 400 + 100 * (time.monotonic() - began)
    time.sleep(0.1)  # the kernel's clock: room for the packet that ends the wait
    assert 100 <= len(world.arrived()) <= most
    assert world.router.counters().paced >= 1000 - most


def test_bytes(with_limits):
    world = with_limits(megabytes_per_s=1)
    began = time.monotonic()
    world.send(*[packets.udp_frame(WEB, 4000, payload=bytes(1400))] * 3000)
    most = 2000 + 750 * (time.monotonic() - began)
    time.sleep(0.1)
    arrived = len(world.arrived())
    assert 700 <= arrived <= most, "about a megabyte, at once, and some after it"
    assert world.router.counters().paced >= 3000 - most


def test_bytes_from_outside(with_limits):
    world = with_limits(megabytes_per_s=1)
    with world.guest_socket(socket.SOCK_DGRAM) as one:
        one.bind(("10.0.0.2", 4000))
        one.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)
        one.sendto(b"x", (WEB, 5000))
        world.settle()
        answers = world.in_outside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        with answers:
            answers.bind((WEB, 5000))
            began = time.monotonic()
            for _ in range(3000):
                answers.sendto(bytes(1400), (str(world.address), 4000))
            spent = time.monotonic() - began
        assert world.router.counters().paced >= 1000 - 750 * spent


def test_the_defaults_are_far_from_ordinary_work():
    limits = NetworkLimits()
    assert limits.concurrent_connections >= 256
    assert limits.megabytes_per_s >= 1000


def test_one_sandbox_cannot_fill_the_table_of_connections(with_limits):
    """With half-open, refused and strange packets: entries are kept for what was let through only."""
    world = with_limits(concurrent_connections=50)
    for port in range(1, 3000):
        world.send(packets.tcp_frame(f"93.1.{port >> 8}.{port & 255}", port))
        world.send(packets.tcp_frame("10.1.1.1", port), packets.tcp_frame(WEB, port, flags=packets.ACK))
    world.settle()
    assert len(world.router.flows()) <= 60
