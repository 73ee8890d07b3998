"""What a slot had open is forgotten with it, by the hub and the host: or one sandbox after another would fill their
tables, whose entries last for days."""

from __future__ import annotations

import os
import socket
import time
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from cpuos.node.network.conntrack import ConntrackSocket, Flow, read_flows
from cpuos.node.network.hub import host_rules
from cpuos.node.network.log_sockets import open_end_socket
from cpuos.node.network.namespaces import inside
from cpuos.node.network.plan import BlockPlan
from cpuos.testing.sealed import SealedWorld, addresses
from cpuos.testing.sealed.slot import SealedSlot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def known(sealed: SealedWorld, slot: SealedSlot) -> tuple[list[Flow], list[Flow]]:
    """The slot's TCP connections as hub and host have them."""

    def read(source: IPv4Address) -> list[Flow]:
        with ConntrackSocket() as table:
            return [flow for flow in table.flows(source=source) if flow.protocol == "tcp"]

    return (
        inside(sealed.hub.path, lambda: read(slot.plan.address)),
        sealed.in_host(lambda: read(slot.plan.hub_address)),
    )


def open_connection(slot: SealedSlot, address: str) -> socket.socket:
    made = slot.socket()
    made.connect((address, 80))
    return made


def test_all_of_a_slot_is_forgotten_and_its_ends_are_told(sealed):
    with sealed.slot() as slot, sealed.slot() as other, open_end_socket(sealed.hub.path) as ends:
        with open_connection(slot, addresses.WEB), open_connection(other, addresses.WEB):
            before = len(known(sealed, slot)[1])
            assert len(known(sealed, slot)[0]) == 1
            assert sealed.in_host(lambda: sealed.hub.end_flows(slot.plan)) == 1
            in_hub, on_host = known(sealed, slot)
            assert in_hub == []
            assert len(on_host) == before - 1
            assert len(known(sealed, other)[0]) == 1, "the neighbour's goes on"
            told = [flow for flow in read_flows(ends.recv(1 << 16)) if flow.source == slot.plan.address]
            assert [(str(flow.address), flow.port) for flow in told] == [(addresses.WEB, 80)]
            assert told[0].bytes_sent > 100
        assert sealed.in_host(lambda: sealed.hub.end_flows(other.plan)) == 1


def test_what_has_ended_is_forgotten_by_the_host_as_soon_as_by_the_hub(sealed):
    """An entry of the host's that outlives that of the hub could not be told from another sandbox's at a kill."""
    before = sealed.in_host(lambda: _time_wait_of_others())
    with sealed.slot() as slot:
        with slot.socket() as made:
            made.connect((addresses.WEB, 5000))
            made.sendall(b"x")
            assert made.recv(1) == b"x"
        with slot.socket(socket.SOCK_DGRAM) as unanswered:
            unanswered.sendto(b"x", (addresses.WEB, 4))
        deadline = time.monotonic() + 60  # TIME_WAIT of a host is 120 s
        while any(_left(sealed, slot)):
            assert time.monotonic() < deadline, _left(sealed, slot)
            time.sleep(0.2)
    assert sealed.in_host(lambda: _time_wait_of_others()) == before == 120


def _left(sealed: SealedWorld, slot: SealedSlot) -> tuple[list[Flow], list[Flow]]:
    def read(source: IPv4Address) -> list[Flow]:
        with ConntrackSocket() as table:
            return [flow for flow in table.flows(source=source) if str(flow.address) == addresses.WEB]

    return (
        inside(sealed.hub.path, lambda: read(slot.plan.address)),
        sealed.in_host(lambda: read(slot.plan.hub_address)),
    )


def _time_wait_of_others() -> int:
    return int(Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_time_wait").read_text())


def test_a_kernel_without_timeouts_of_their_own_gets_the_rest(sealed):
    """The same table but for that."""
    plan = BlockPlan(network=IPv4Network("10.231.0.0/20"))
    whole, rest = (host_rules("7e57ed", plan, with_timeouts=with_them) for with_them in (True, False))
    assert "timeout" not in rest
    kept = [line.strip() for line in rest.splitlines() if line.strip()]
    lines = iter(line.strip() for line in whole.splitlines())
    assert all(line in lines for line in kept), "in the same order"
    for rules in (whole, rest):
        checked = sealed.run_in_host(["nft", "-c", "-f", "-"], input=rules)
        assert checked.returncode == 0, checked.stderr


def test_what_a_router_cut_is_forgotten_and_nothing_else(sealed):
    with sealed.slot() as slot:
        with open_connection(slot, addresses.WEB), open_connection(slot, addresses.OTHER_WEB):
            with slot.in_router(ConntrackSocket) as table:
                cut = [flow for flow in table.flows() if str(flow.address) == addresses.WEB]
            assert sealed.in_host(lambda: sealed.hub.end_flows(slot.plan, cut)) == 1
            assert [str(flow.address) for flow in known(sealed, slot)[0]] == [addresses.OTHER_WEB]
            assert sealed.in_host(lambda: sealed.hub.end_flows(slot.plan, [])) == 0
        assert sealed.in_host(lambda: sealed.hub.end_flows(slot.plan)) == 1
