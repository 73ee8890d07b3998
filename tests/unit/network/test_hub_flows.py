"""What a slot had open is forgotten with it, by the hub and the host: or one sandbox after another would fill their
tables, whose entries last for days."""

from __future__ import annotations

import os
import socket
from ipaddress import IPv4Address

import pytest

from cpuos.node.network.conntrack import ConntrackSocket, Flow, read_flows
from cpuos.node.network.log_sockets import open_end_socket
from cpuos.node.network.namespaces import inside
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


def test_what_a_router_cut_is_forgotten_and_nothing_else(sealed):
    with sealed.slot() as slot:
        with open_connection(slot, addresses.WEB), open_connection(slot, addresses.OTHER_WEB):
            with slot.in_router(ConntrackSocket) as table:
                cut = [flow for flow in table.flows() if str(flow.address) == addresses.WEB]
            assert sealed.in_host(lambda: sealed.hub.end_flows(slot.plan, cut)) == 1
            assert [str(flow.address) for flow in known(sealed, slot)[0]] == [addresses.OTHER_WEB]
            assert sealed.in_host(lambda: sealed.hub.end_flows(slot.plan, [])) == 0
        assert sealed.in_host(lambda: sealed.hub.end_flows(slot.plan)) == 1
