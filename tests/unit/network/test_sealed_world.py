"""The sealed world itself: it is sealed, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpuos.node.network.namespaces import inside
from cpuos.testing.sealed import addresses
from cpuos.testing.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

KILLED = """
from cpuos.testing.sealed import SealedWorld
with SealedWorld() as world, world.slot() as slot:
    print(world._folder, flush=True)
    input()
"""


def test_no_way_leads_out(sealed):
    sealed.assert_sealed()
    own = os.stat("/proc/self/ns/net").st_ino
    for place in (sealed.host, sealed.internet):
        assert place.stat().st_ino != own
        routes = inside(place, lambda: Path("/proc/thread-self/net/route").read_text())
        assert {line.split()[0] for line in routes.splitlines()[1:]} <= {"eth0", "lo", "cpuos5ea1ed"}


def test_a_link_to_elsewhere_is_told(sealed):
    sealed.run_in_host(["ip", "link", "add", "stray0", "type", "veth", "peer", "name", "stray1"])
    try:
        with pytest.raises(AssertionError, match="stray0"):
            sealed.assert_sealed()
    finally:
        sealed.run_in_host(["ip", "link", "del", "stray0"])


def test_what_leaves_is_seen_whether_or_not_it_is_answered(sealed):
    sealed.clear()
    with sealed.slot() as slot:
        assert slot.connect(addresses.WEB, 80) == "connected"
        assert slot.connect(addresses.WEB, 4) == "ConnectionRefusedError"
    assert {packet.port for packet in sealed.packets() if packet.protocol == "tcp"} == {80, 4}
    assert [(seen.server, seen.port) for seen in sealed.connections()] == [(addresses.WEB, 80)]


def test_who_is_asked_for_on_the_link_is_told_but_for_the_gateway(sealed):
    """A packet to a neighbour that is not there is seen by its question; those for the gateway come at any time."""
    sealed.clear()
    for place in (addresses.HOST_GATEWAY, "80.90.100.77"):
        sealed.run_in_host(["ip", "neigh", "flush", "dev", "eth0"])
        sealed.in_host(lambda place=place: _send(place))
    wait_until(lambda: [one for one in sealed.packets() if one.protocol == "arp"])
    assert {one.destination for one in sealed.packets() if one.protocol == "arp"} == {"80.90.100.77"}


def _send(place: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.sendto(b"x", (place, 9))


def test_a_killed_test_leaves_nothing():
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as test:
        assert test.stdout is not None
        folder = Path(test.stdout.readline().strip())
        assert (folder / "hub").exists()
        os.killpg(test.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while folder.exists() or str(folder) in Path("/proc/self/mountinfo").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
