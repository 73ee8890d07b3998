"""Policies by chance, over a world so small that their rules meet."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

from hypothesis import strategies as st

from cpuos.node.network.policy_rules import NamedAddress

NAMES = ("a.test", "x.a.test", "b.test", "y.x.a.test")
PUBLIC = tuple(IPv4Address(text) for text in ("93.184.215.14", "93.184.215.15", "93.184.216.1", "1.1.1.1"))
PORTS = (22, 25, 53, 80, 443, 853, 8001)

_names = st.sampled_from([*NAMES, "*.a.test", "*.x.a.test", "*.test"])
_near = ["93.184.215.14", "93.184.215.14/31", "93.184.215.0/24", "93.184.0.0/16", "1.1.1.1"]
_wide = ["0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1"]
_blocked = ["10.0.0.0/8", "10.77.0.5", "80.90.100.10", "169.254.169.254"]
_networks = st.sampled_from([*_near, *_wide, *_blocked])
_ports = st.sampled_from(["", "", "", ":22", ":53", ":80", ":443", ":853", ":25", ":8000-8010", ":1-65535", ":80-443"])
_protocols = st.sampled_from(["", "", "/tcp", "/udp"])


def targets() -> st.SearchStrategy[str]:
    return st.builds(lambda *parts: "".join(parts), st.one_of(_names, _networks), _ports, _protocols)


def policies() -> st.SearchStrategy[Any]:
    deny = st.lists(targets(), max_size=4)
    allow = st.lists(targets(), max_size=6)
    return st.one_of(
        st.builds(lambda deny: {"deny": deny}, deny),
        st.builds(lambda allow, deny: {"mode": "allowlist", "allow": allow, "deny": deny}, allow, deny),
        st.builds(lambda allow, deny: {"mode": "allowlist", "allow": allow, "deny": deny}, allow, deny),
        st.just("off"),
    )


def layers() -> st.SearchStrategy[list[Any]]:
    return st.lists(policies(), min_size=1, max_size=3)


def learned() -> st.SearchStrategy[list[NamedAddress]]:
    entry = st.builds(
        lambda name, address: NamedAddress(name=name, address=address, ttl_s=300),
        st.sampled_from(NAMES),
        st.sampled_from([*PUBLIC, IPv4Address("10.77.0.5"), IPv4Address("10.20.30.40")]),
    )
    return st.lists(entry, max_size=5)
