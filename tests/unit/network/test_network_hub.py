"""The hub holds by itself what each router holds: here the routers let all pass, as if they had been overcome."""

from __future__ import annotations

import os
import socket
import subprocess
from ipaddress import IPv4Address

import pytest

from cpuos.node.network.hub import remove_host_network
from cpuos.node.network.namespaces import inside
from cpuos.testing.sealed import SealedWorld, addresses
from cpuos.types.blocked import Exemption

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

QUICK_S = 0.4


@pytest.fixture(scope="module")
def slots(sealed: SealedWorld):
    with sealed.slot() as one, sealed.slot() as other:
        yield one, other


def test_a_slot_reaches_the_internet_by_the_hosts_address(sealed, slots):
    sealed.clear()
    assert slots[0].connect(addresses.WEB, 80) == "connected"
    assert slots[0].ask_udp(addresses.WEB, 5000, b"hello") == b"hello"
    assert {seen.client for seen in sealed.connections()} == {addresses.HOST}


@pytest.mark.parametrize("address", [*addresses.PRIVATE, addresses.METADATA, addresses.AZURE, "127.0.0.1", "240.0.0.1"])
def test_blocked_ranges_stay_blocked_behind_an_overcome_router(sealed, slots, address):
    sealed.clear()
    assert slots[0].connect(address, 80, timeout_s=QUICK_S) != "connected"
    seen = [packet for packet in sealed.packets() if packet.protocol in ("tcp", "udp")]
    # Connections of an earlier test may still be ending.
    assert [packet for packet in seen if packet.destination != addresses.WEB] == []


@pytest.mark.parametrize("port", [25, 465, 587])
def test_mail_does_not_leave(sealed, slots, port):
    sealed.clear()
    assert slots[0].connect(addresses.MAIL, port, timeout_s=QUICK_S) != "connected"
    assert [packet for packet in sealed.packets() if packet.port == port] == []


def test_the_host_is_not_reached(sealed, slots):
    with sealed.in_host(lambda: socket.create_server(("0.0.0.0", 9999))):
        for address in (addresses.HOST, "10.231.0.1"):
            assert slots[0].connect(address, 9999, timeout_s=QUICK_S) != "connected"


def test_slots_do_not_reach_each_other(slots):
    one, other = slots
    with other.in_router(lambda: socket.create_server(("0.0.0.0", 9999))):
        assert one.connect(str(other.plan.address), 9999, timeout_s=QUICK_S) != "connected"
        assert one.connect(str(other.plan.hub_address), 9999, timeout_s=QUICK_S) != "connected"


def test_a_forged_source_dies_at_the_hub(sealed, slots):
    """An overcome router that takes its neighbour's address."""
    one, other = slots
    sealed.clear()
    forged = str(other.plan.address)
    rule = "flush ruleset; add table ip t; add chain ip t p { type nat hook postrouting priority srcnat; };"
    rule += f'add rule ip t p oifname "wan" snat to {forged}'
    subprocess.run(["nsenter", f"--net={one.router}", "nft", rule], check=True)
    try:
        assert one.connect(addresses.WEB, 80, timeout_s=QUICK_S) == "TimeoutError"
        assert [packet for packet in sealed.packets() if packet.protocol == "tcp"] == []
    finally:
        rule = rule.replace(forged, str(one.plan.address))
        subprocess.run(["nsenter", f"--net={one.router}", "nft", rule], check=True)
    assert one.connect(addresses.WEB, 80) == "connected"


def test_nothing_comes_in_from_outside(sealed, slots):
    """Not even by a host, or a neighbour of it, that routes to the hub."""
    one, _ = slots
    with one.in_router(lambda: socket.create_server(("0.0.0.0", 9999))):
        sealed.run_in_host(["ip", "route", "add", "10.231.0.0/20", "via", "10.231.0.2"])
        try:
            tried = sealed.run_in_host(
                ["python3", "-c", f"import socket;socket.create_connection(('{one.plan.address}', 9999), {QUICK_S})"]
            )
            assert "TimeoutError" in tried.stderr or "timed out" in tried.stderr
        finally:
            sealed.run_in_host(["ip", "route", "del", "10.231.0.0/20"])


def test_an_exemption_opens_one_service(sealed, slots):
    one, _ = slots
    address = IPv4Address(addresses.MIRROR)
    sealed.make_hub(exemptions=[Exemption(name="mirror.example", address=address, port=8080)])
    try:
        assert one.connect(addresses.MIRROR, 8080) == "connected"
        assert one.connect(addresses.MIRROR, 80, timeout_s=QUICK_S) == "TimeoutError"
        assert one.connect("10.77.0.6", 8080, timeout_s=QUICK_S) == "TimeoutError"
    finally:
        sealed.make_hub()
    assert one.connect(addresses.MIRROR, 8080, timeout_s=QUICK_S) == "TimeoutError"


@pytest.mark.parametrize(("kind", "leaves"), [(8, True), (13, False), (5, False), (3, False)])
def test_of_icmp_only_echo_leaves(sealed, slots, kind, leaves):
    sealed.clear()
    message = bytes([kind, 0, 0, 0, 0, 1, 0, 1]) + bytes(8)
    total = sum(int.from_bytes(message[at : at + 2], "big") for at in range(0, len(message), 2))
    checksum = (~(total + (total >> 16)) & 0xFFFF).to_bytes(2, "big")
    with slots[0].in_guest(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)) as made:
        made.sendto(message[:2] + checksum + message[4:], (addresses.WEB, 0))
    assert slots[0].connect(addresses.WEB, 80) == "connected"  # what was sent before has passed by then
    assert any(packet.protocol == "icmp" for packet in sealed.packets()) is leaves


def test_segments_fit_the_way_out_of_the_host(sealed, slots):
    """A host behind a tunnel or in a cloud has smaller packets than sandboxes know of."""
    server = inside(sealed.internet, lambda: socket.create_server(("0.0.0.0", 9998)))
    server.settimeout(30)
    sealed.run_in_host(["ip", "link", "set", "eth0", "mtu", "1300"])
    try:
        with server, slots[0].socket() as made:
            made.connect((addresses.WEB, 9998))
            connection, _ = server.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 1260
    finally:
        sealed.run_in_host(["ip", "link", "set", "eth0", "mtu", "1500"])


def test_opening_again_cuts_nothing(sealed, slots):
    with slots[0].socket() as going_on:
        going_on.connect((addresses.WEB, 5000))
        sealed.make_hub()
        going_on.send(b"still there")
        assert going_on.recv(100) == b"still there"


def test_the_host_is_as_before_when_the_hub_is_removed(sealed):
    before = sealed.run_in_host(["nft", "list", "ruleset"]).stdout
    links = sealed.run_in_host(["ip", "-br", "link"]).stdout
    assert "cpuos_5ea1ed" in before
    assert "cpuos5ea1ed" in links
    removed = sealed.in_host(lambda: remove_host_network("5ea1ed"))
    try:
        assert removed == ["link cpuos5ea1ed", "nft table ip cpuos_5ea1ed"]
        assert "cpuos" not in sealed.run_in_host(["nft", "list", "ruleset"]).stdout
        assert "cpuos" not in sealed.run_in_host(["ip", "-br", "link"]).stdout
        assert sealed.in_host(lambda: remove_host_network("5ea1ed")) == []
    finally:
        sealed.make_hub()
