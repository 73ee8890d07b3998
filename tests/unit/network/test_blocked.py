"""The one table of what no sandbox reaches."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpuos.types.blocked import ALWAYS_BLOCKED, Exemption, blocked_reason

addresses = st.integers(0, 2**32 - 1).map(IPv4Address)


def reason(address: str, port: int | None = 443, protocol: str = "tcp", **more) -> str | None:
    return blocked_reason(IPv4Address(address), protocol=protocol, port=port, **more)


@given(addresses)
@example(IPv4Address("100.100.100.200"))
@example(IPv4Address("192.0.0.192"))
@example(IPv4Address("255.255.255.255"))
def test_what_is_not_of_the_public_internet_is_blocked(address):
    """By another table than ours: the one of Python's library."""
    if not address.is_global or address.is_multicast:
        assert blocked_reason(address, protocol="tcp", port=443)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("0.0.0.0", "this network"),
        ("10.0.0.1", "private"),
        ("100.64.0.1", "shared"),
        ("100.100.100.200", "shared"),
        ("127.0.0.1", "loopback"),
        ("168.63.129.16", "cloud platform"),
        ("169.254.169.254", "link-local"),
        ("172.31.255.255", "private"),
        ("192.0.0.192", "protocol assignments"),
        ("192.168.0.1", "private"),
        ("198.19.255.255", "benchmarking"),
        ("224.0.0.251", "multicast"),
        ("255.255.255.255", "reserved"),
    ],
)
def test_ranges_have_a_name(address, name):
    assert reason(address) == name


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "100.128.0.0", "172.32.0.0", "168.63.129.17"])
def test_the_internet_is_open(address):
    assert reason(address) is None
    assert reason(address, None, "icmp") is None


@pytest.mark.parametrize("port", [25, 465, 587])
def test_mail(port):
    assert reason("1.1.1.1", port)
    assert reason("1.1.1.1", port, "udp") is None


def test_the_hosts_own_addresses():
    assert reason("1.1.1.1", host_addresses=[IPv4Address("1.1.1.1")]) == "the host's own address"
    assert reason("1.1.1.1", None, "icmp", host_addresses=[IPv4Address("1.1.1.1")])


def test_an_exemption_is_one_address_protocol_and_port():
    exemptions = [Exemption(name="mirror", address=IPv4Address("10.0.0.9"), port=25)]
    assert reason("10.0.0.9", 25, exemptions=exemptions) is None
    assert reason("10.0.0.9", 25, "udp", exemptions=exemptions)
    assert reason("10.0.0.9", 26, exemptions=exemptions)
    assert reason("10.0.0.8", 25, exemptions=exemptions)
    assert reason("10.0.0.9", None, "icmp", exemptions=exemptions)


def test_ranges_do_not_overlap():
    networks = [blocked.network for blocked in ALWAYS_BLOCKED]
    assert not [(a, b) for a in networks for b in networks if a is not b and a.overlaps(b)]
    assert all(blocked.name and blocked.reason for blocked in ALWAYS_BLOCKED)
