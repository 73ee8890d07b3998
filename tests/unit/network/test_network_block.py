"""Which addresses an instance takes for its network: never any that the host needs."""

from __future__ import annotations

import os
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.errors import Conflict, InvalidRequest
from cpuos.node.network.block import CANDIDATES, Taken, choose_block, read_routes, taken_addresses
from cpuos.node.network.netlink import Route
from cpuos.node.network.plan import BlockPlan
from cpuos.types.blocked import Exemption
from cpuos.types.exceptions import parse_exceptions


def route(network: str, device: str = "eth0") -> Route:
    return Route(network=IPv4Network(network), device=device)


def taken(*networks: str) -> list[Taken]:
    return [Taken(network=IPv4Network(network), by="a test") for network in networks]


def test_auto_takes_the_first_free_candidate():
    assert choose_block("auto", taken=[], slots=80) == CANDIDATES[0]
    assert choose_block("auto", taken=taken("10.231.0.0/30"), slots=80) == CANDIDATES[1], "another instance's link"
    assert choose_block("auto", taken=taken("10.0.0.0/8"), slots=80) == IPv4Network("172.29.0.0/20")
    everything = taken(*(str(candidate) for candidate in CANDIDATES))
    with pytest.raises(Conflict) as caught:
        choose_block("auto", taken=everything, slots=80)
    assert caught.value.code == "network_block_taken"


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        ("10.5.0.0/20", "10.5.3.0/24"),
        ("10.5.0.0/20", "10.0.0.0/8"),
        ("10.5.0.0/20", "10.5.15.255/32"),
        ("192.168.7.0/24", "192.168.0.0/16"),
    ],
)
def test_a_block_that_is_set_and_clashes_is_refused_by_name(wanted, met):
    with pytest.raises(Conflict) as caught:
        choose_block(wanted, taken=taken("172.16.0.0/12", met), slots=80)
    assert caught.value.code == "network_block_taken"
    assert caught.value.details == {"block": wanted, "taken_by": "a test", "network": met}


@pytest.mark.parametrize(
    "wanted",
    ["", "10.5.0.1/20", "10.5.0.0/33", "fd00::/64", "10.5.0.0/27", "127.0.0.0/20", "224.0.0.0/20", "0.0.0.0/8"],
)
def test_what_is_no_block_is_refused(wanted):
    with pytest.raises(InvalidRequest, match="network_block"):
        choose_block(wanted, taken=[], slots=10)


def test_a_block_holds_all_slots():
    assert choose_block("10.5.0.0/24", taken=[], slots=200) == IPv4Network("10.5.0.0/24")
    with pytest.raises(InvalidRequest, match="no room"):
        choose_block("10.5.0.0/24", taken=[], slots=300)


def test_routes_of_every_kind_count_but_the_default_and_the_own_link():
    routes = [
        route("0.0.0.0/0"),
        route("10.231.0.0/30", "cpuosabcdef"),
        route("10.8.0.0/24", "tun0"),
        route("192.168.9.0/24", ""),
    ]
    found = {(str(entry.network), entry.by) for entry in _taken(routes)}
    assert found == {("10.8.0.0/24", "the route over tun0"), ("192.168.9.0/24", "a route")}


def test_resolvers_mirrors_and_exceptions_count(tmp_path):
    for path, text in {
        "etc/resolv.conf": "# nameserver 9.9.9.9\nnameserver 10.231.4.4\nnameserver fd00::1\nnameserver 127.0.0.53\n",
        "etc/apt/sources.list.d/x.sources": "Types: deb\nURIs: http://10.231.20.1/debian https://mirror.lan/y\n",
        "etc/apt/apt.conf.d/proxy": 'Acquire::http::Proxy "http://172.29.3.3:3128";\n',
        "etc/pip.conf": "[global]\nindex-url = https://user:secret@100.113.0.9:8443/simple\n",
        "etc/hosts": "127.0.0.1 localhost\n192.168.224.7 mirror.lan # ours\n",
        "root/.npmrc": "registry=http://[broken\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    exemption = Exemption(name="m.example", address=IPv4Address("10.231.250.1"), port=443)
    found = {str(entry.network): entry.by for entry in _taken([], exemptions=[exemption], root=tmp_path)}
    assert found == {
        "10.231.4.4/32": "the resolver in /etc/resolv.conf",
        "127.0.0.53/32": "the resolver in /etc/resolv.conf",
        "10.231.250.1/32": "the network exception m.example",
        "10.231.20.1/32": "the mirror in /etc/apt/sources.list.d/x.sources",
        "192.168.224.7/32": "the mirror in /etc/apt/sources.list.d/x.sources",
        "172.29.3.3/32": "the mirror in /etc/apt/apt.conf.d/proxy",
        "100.113.0.9/32": "the mirror in /etc/pip.conf",
    }


def _taken(routes, *, exemptions=(), root=None):
    return taken_addresses(routes, own_link="cpuosabcdef", exemptions=exemptions, root=root or Path("/nonexistent"))


@given(st.lists(st.sampled_from(["10.231.0.0/16", "172.29.0.0/17", "100.113.16.0/20", "10.231.16.4/32"]), unique=True))
def test_what_is_chosen_meets_nothing_taken(networks):
    chosen = choose_block("auto", taken=taken(*networks), slots=80)
    assert not any(chosen.overlaps(IPv4Network(network)) for network in networks)


def test_this_hosts_routes_can_be_read():
    assert any(found.network == IPv4Network("127.0.0.0/8") and found.device == "lo" for found in read_routes())


def test_the_plan_gives_each_slot_an_address_of_its_own():
    plan = BlockPlan(network=IPv4Network("10.5.0.0/26"))
    addresses = [plan.slot(number).address for number in range(plan.slots)]
    assert len(set(addresses)) == len(addresses) == 59
    assert not {plan.host_address, plan.hub_address, *plan.link_network} & set(addresses)
    assert plan.network.broadcast_address not in addresses
    with pytest.raises(ValueError, match="outside"):
        plan.slot(plan.slots)
    assert all(len(plan.slot(number).hub_device) <= 15 for number in (0, plan.slots - 1))


def test_exceptions_are_read():
    assert parse_exceptions(["Mirror.Example=10.0.0.5:443", "ntp.example=10.0.0.6:123/udp"]) == (
        Exemption(name="mirror.example", address=IPv4Address("10.0.0.5"), port=443),
        Exemption(name="ntp.example", address=IPv4Address("10.0.0.6"), port=123, protocol="udp"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.example",
        "a.example=10.0.0.5",
        "a.example=10.0.0:1",
        "*.a.example=10.0.0.5:1",
        "a=1.2.3.4:0",
        "a=1.2.3.4:70000",
        "10.0.0.5=10.0.0.5:1",
        "a b=10.0.0.5:1",
        "a.example=10.0.0.5:1/icmp",
        "a.example=10.0.0.5:1 b=1.1.1.1:1",
    ],
)
def test_wrong_exceptions_are_named(text):
    with pytest.raises(InvalidRequest, match="cannot read the network exception"):
        parse_exceptions([text])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_routes_and_addresses_of_a_namespace(sealed):
    routes = sealed.in_host(read_routes)
    assert Route(network=IPv4Network("0.0.0.0/0"), device="eth0") in routes
    assert Route(network=IPv4Network("80.90.100.0/24"), device="eth0") in routes
