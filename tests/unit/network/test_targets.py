"""Entries of allow and deny lists: read, shown, and what they cover."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.types.targets import parse_target


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("api.example.com", "api.example.com"),
        ("API.Example.com.", "api.example.com"),
        (" *.example.com ", "*.example.com"),
        ("*.example.com:8443/TCP", "*.example.com:8443/tcp"),
        ("files.example.com:8000-8010", "files.example.com:8000-8010"),
        ("files.example.com:8000-8000", "files.example.com:8000"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("*.bücher.example:443", "*.xn--bcher-kva.example:443"),
        ("_dmarc.example.com/udp", "_dmarc.example.com/udp"),
        ("1.2.3.4", "1.2.3.4"),
        ("1.2.3.4/32:53/udp", "1.2.3.4:53/udp"),
        ("1.2.3.0/24:443", "1.2.3.0/24:443"),
        ("1.2.3.0/255.255.255.0", "1.2.3.0/24"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("localhost", "localhost"),
    ],
)
def test_reads_and_shows(text, shown):
    target = parse_target(text)
    assert target.text == shown
    assert parse_target(shown) == target


NO_TARGETS = """
* *. . : :443 /tcp example.com: example.com:0 example.com:65536 example.com:9-8 example.com:x example.com:1-2-3
a..b -a.example a-.example *.*.example a.*.example *example.com exa*mple.com https://example.com example.com/path
example.com:443:444 ::1 [::1]:443 fe80::1 1.2.3 1.2.3.4.5 1.2.3.4/24 1.2.3.256 01.2.3.4 1.2.3.4/33 2130706433
user@example.com example.com;drop a,b a{b} a"b a$b a'b a`b a\\b a#b 1.2.3.4/tcp:80 example.com/icmp 1.2.3.4/tcp/udp
² ²² *.² a／b.example a：443 example.com:４４３ 💥.example:x
"""
WITH_BLANKS = ["", " ", "a b", "a\nb", "a.example\0", "a.example\n:443"]
TOO_LONG = [f"{'a' * 64}.example", ".".join(["a" * 60] * 5)]


@pytest.mark.parametrize("text", [*NO_TARGETS.split(), *WITH_BLANKS, *TOO_LONG])
def test_refuses(text):
    with pytest.raises(ValueError) as raised:
        parse_target(text)
    assert repr(text) in str(raised.value)


@given(st.text(max_size=60))
def test_whatever_is_read_is_shown_in_a_plain_alphabet(text):
    """Rules, records and terminals show it."""
    try:
        target = parse_target(text)
    except ValueError:
        return
    assert re.fullmatch(r"(\*\.)?[a-z0-9_.-]+(/\d{1,2})?(:\d{1,5}(-\d{1,5})?)?(/tcp|/udp)?", target.text)
    assert parse_target(target.text) == target


_label = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,10}[a-z0-9])?", fullmatch=True)
_name = st.lists(_label, min_size=1, max_size=4).map(".".join).filter(lambda name: not re.fullmatch(r"[0-9.]+", name))


@given(_name, _name)
def test_a_wildcard_covers_what_lies_below_and_nothing_else(name, other):
    wildcard = parse_target(f"*.{name}")
    assert wildcard.covers_name(f"{other}.{name}")
    assert not wildcard.covers_name(name)
    assert not wildcard.covers_name(f"{other}{name}") or other.endswith(".") or f"{other}{name}".endswith(f".{name}")
    assert wildcard.covers_name(other) == other.endswith(f".{name}")
    assert parse_target(name).covers_name(other) == (name == other)


@given(st.integers(0, 2**32 - 1), st.integers(0, 32), st.integers(0, 2**32 - 1))
def test_a_network_covers_its_addresses(number, prefix, other):
    network = ipaddress.IPv4Network((number, prefix), strict=False)
    target = parse_target(str(network))
    assert target.covers_address(ipaddress.IPv4Address(other)) == (other >> (32 - prefix) == number >> (32 - prefix))
    assert not target.covers_name("example.com")


@pytest.mark.parametrize(
    ("text", "covered", "not_covered"),
    [
        ("1.2.3.4", [("tcp", 1), ("udp", 65535), ("icmp", None)], []),
        ("1.2.3.4/tcp", [("tcp", 1)], [("udp", 1), ("icmp", None)]),
        ("1.2.3.4:80-90", [("tcp", 80), ("udp", 90)], [("tcp", 79), ("udp", 91), ("icmp", None)]),
        ("1.2.3.4:53/udp", [("udp", 53)], [("tcp", 53)]),
        ("a.example", [("tcp", 80), ("tcp", 443)], [("tcp", 22), ("udp", 443), ("icmp", None)]),
        ("a.example:22", [("tcp", 22)], [("tcp", 443), ("udp", 22)]),
        ("a.example/udp", [("udp", 443)], [("tcp", 443), ("udp", 53)]),
    ],
)
def test_ports_that_are_allowed(text, covered, not_covered):
    target = parse_target(text)
    assert all(target.covers_port(*one) for one in covered)
    assert not any(target.covers_port(*one) for one in not_covered)


@pytest.mark.parametrize(
    ("text", "covered", "not_covered"),
    [
        ("a.example", [("tcp", 22), ("udp", 443), ("icmp", None)], []),
        ("a.example:22", [("tcp", 22), ("udp", 22)], [("tcp", 443), ("icmp", None)]),
        ("a.example/udp", [("udp", 5)], [("tcp", 443), ("icmp", None)]),
    ],
)
def test_ports_that_are_denied(text, covered, not_covered):
    """A name that is denied is denied whole, unless it says otherwise."""
    target = parse_target(text)
    assert all(target.covers_port(*one, denying=True) for one in covered)
    assert not any(target.covers_port(*one, denying=True) for one in not_covered)
