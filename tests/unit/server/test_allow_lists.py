"""Which entries of an allow list open nothing at all."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.errors import InvalidRequest
from cpuos.server.allow_lists import check_allow_list, why_shut
from cpuos.types.blocked import Exemption, blocked_reason
from cpuos.types.network import NetworkPolicy
from cpuos.types.special_names import special_name
from cpuos.types.targets import parse_target

SHUT = {
    "10.0.0.0/8": "private",
    "10.1.2.3": "private",
    "192.168.1.0/24:443": "private",
    "127.0.0.1:8080/tcp": "loopback",
    "169.254.169.254": "link-local",
    "168.63.129.16": "cloud platform",
    "224.0.0.0/3": "multicast",
    "0.0.0.0": "this network",
    "255.255.255.255/udp": "reserved",
    "localhost": "the machine itself (RFC 6761)",
    "*.localhost:3000": "the machine itself (RFC 6761)",
    "printer": "a name without a dot",
    "*.internal": "an operator's own network; clouds serve metadata here",
    "metadata.google.internal": "an operator's own network; clouds serve metadata here",
    "5.10.in-addr.arpa": "the reverse zone of addresses that are always blocked: private",
    "mail.example:25": "SMTP",
    "mail.example:465/tcp": "SMTPS",
    "1.2.3.4:587/tcp": "mail submission",
}
OPEN = """
0.0.0.0/0 8.0.0.0/5 8.0.0.0/6 1.2.3.4 1.2.3.4:25 1.2.3.4:24-25/tcp mail.example mail.example:25-26 mail.example:25/udp
*.com *.example.com a.example 192.0.1.0/24 172.32.0.0/12 100.128.0.0/10 8.in-addr.arpa local.example
"""
EXCEPTIONS = [
    Exemption(name="mirror.corp", address=IPv4Address("10.20.0.5"), port=443),
    Exemption(name="printer", address=IPv4Address("192.168.1.9"), port=53, protocol="udp"),
    Exemption(name="relay.example", address=IPv4Address("10.0.0.9"), port=25),
]


@pytest.mark.parametrize(("text", "reason"), SHUT.items())
def test_it_opens_nothing(text, reason):
    assert why_shut(parse_target(text)) == reason


@pytest.mark.parametrize("text", OPEN.split())
def test_it_opens_something(text):
    assert why_shut(parse_target(text)) is None


EXCEPTED = "mirror.corp *.corp:443 10.0.0.0/8 10.20.0.5:443 10.20.0.5:1-1000/tcp printer:53/udp relay.example:25"


@pytest.mark.parametrize("text", EXCEPTED.split())
def test_what_the_operator_has_excepted_opens_something(text):
    assert why_shut(parse_target(text), exemptions=EXCEPTIONS) is None
    assert why_shut(parse_target(text)) is not None


@pytest.mark.parametrize(
    "text",
    ["other.corp", "10.20.0.5:80", "10.20.0.5/udp", "10.21.0.0/16", "printer", "printer:53/tcp", "mail.example:25"],
)
def test_an_exception_is_for_its_own_service_only(text):
    assert why_shut(parse_target(text), exemptions=EXCEPTIONS) is not None


@given(st.integers(0, 2**32 - 1), st.integers(0, 32), st.integers(0, 2**32 - 1), st.sampled_from(["tcp", "udp"]))
def test_it_is_never_said_of_what_opens_an_address(number, prefix, within, protocol):
    """Against the judge of single destinations."""
    span = 1 << (32 - prefix)
    base = number // span * span
    target = parse_target(f"{IPv4Address(base)}/{prefix}")
    address = IPv4Address(base + within % span)
    if why_shut(target) is not None:
        assert blocked_reason(address, protocol=protocol, port=4711)
    elif prefix == 32:
        assert blocked_reason(address, protocol=protocol, port=4711) is None


LABELS = ["a", "internal", "localhost", "arpa", "in-addr", "10", "8", "home"]


@given(st.lists(st.sampled_from(LABELS), min_size=1, max_size=5))
def test_names_as_the_forwarder_has_them(labels):
    name = ".".join(labels)
    try:
        target = parse_target(name)
    except ValueError:
        return
    if target.name is not None:
        assert why_shut(target) == special_name(name)


def test_the_error_names_the_entry_and_a_deny_list_may_hold_anything():
    policy = NetworkPolicy.model_validate({"allow": ["a.example", "10.0.0.0/8"], "deny": ["localhost", "127.0.0.1"]})
    with pytest.raises(InvalidRequest) as caught:
        check_allow_list(policy, exemptions=[], field="network.allow")
    assert "10.0.0.0/8" in caught.value.what
    assert caught.value.details == {"field": "network.allow", "entry": "10.0.0.0/8", "blocked": "private"}
    check_allow_list(policy, exemptions=EXCEPTIONS)
