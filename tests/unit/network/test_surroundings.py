"""Where the host has a way to, from its routes."""

from __future__ import annotations

import os
from ipaddress import IPv4Address, IPv4Network

import pytest

from cpuos.node.network.namespaces import in_fresh_thread, new_namespace
from cpuos.node.network.netlink import Route, RouteNetlink
from cpuos.node.network.surroundings import EVERYWHERE, Surroundings, is_reached, reach_of, read_surroundings

OWN = "cpuos7e57ed"


def route(network: str, device: str = "eth0", *, is_way: bool = True) -> Route:
    return Route(network=IPv4Network(network), device=device, is_way=is_way)


@pytest.mark.parametrize(
    ("routes", "reach"),
    [
        ([], []),
        ([route("0.0.0.0/0")], EVERYWHERE),
        ([route("0.0.0.0/0", ""), route("10.0.0.0/8")], EVERYWHERE),
        ([route("0.0.0.0/1", "tun0"), route("128.0.0.0/1", "tun0")], EVERYWHERE),
        ([route("0.0.0.0/0", is_way=False)], []),
        ([route("0.0.0.0/0", OWN), route("10.231.0.0/30", OWN)], []),
        ([route("10.0.0.0/8"), route("10.1.0.0/16")], ["10.0.0.0/8"]),
        ([route(f"9.{n >> 8}.{n & 255}.0/25") for n in range(600)], EVERYWHERE),
    ],
    ids=["none", "default", "several devices", "in halves", "blackhole", "our own link", "one within another", "many"],
)
def test_reach_of_routes(routes, reach):
    assert reach_of(routes, own_link=OWN) == tuple(map(IPv4Network, reach))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_host_without_a_way_out_and_then_with_one():
    def look() -> list[Surroundings]:
        os.close(new_namespace())
        with RouteNetlink() as host:
            host.set_up("lo")
            host.set_address("lo", "80.90.100.10/32")
            host.set_route("lo", "80.90.100.0/24")
            alone = read_surroundings("nat", own_link=OWN)
            host.set_route("lo", "0.0.0.0/0")
            return [alone, read_surroundings("nat", own_link=OWN), read_surroundings("none", own_link=OWN)]

    alone, joined, sealed = in_fresh_thread(look)
    assert not is_reached(IPv4Address("1.1.1.1"), alone.reach)
    assert is_reached(IPv4Address("80.90.100.20"), alone.reach)
    assert joined.reach == EVERYWHERE
    assert sealed.reach == ()
    assert alone.addresses == joined.addresses == sealed.addresses == (IPv4Address("80.90.100.10"),)
