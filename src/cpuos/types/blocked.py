"""What no sandbox reaches, whatever its policy, and why. Rules, DNS filter, records and docs read this one table."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["ALWAYS_BLOCKED", "BLOCKED_PORTS", "BlockedRange", "Exemption", "blocked_reason"]


@dataclass(frozen=True, kw_only=True)
class BlockedRange:
    network: ipaddress.IPv4Network
    name: str
    """In refusals and records: "always blocked: NAME"."""
    reason: str


def _range(network: str, name: str, reason: str) -> BlockedRange:
    return BlockedRange(network=ipaddress.IPv4Network(network), name=name, reason=reason)


# The IPv4 ranges of the IANA special-purpose registry (RFC 6890 and its updates), and addresses that clouds use.
ALWAYS_BLOCKED = (
    _range("0.0.0.0/8", "this network", "means the host itself on many systems (RFC 1122)"),
    _range("10.0.0.0/8", "private", "the operator's own network, and the sandbox's router (RFC 1918)"),
    _range("100.64.0.0/10", "shared", "carrier and cloud internals (RFC 6598)"),
    _range("127.0.0.0/8", "loopback", "services of a host (RFC 1122)"),
    _range("168.63.129.16/32", "cloud platform", "the platform service of Azure"),
    _range("169.254.0.0/16", "link-local", "cloud metadata with credentials lives at 169.254.169.254 (RFC 3927)"),
    _range("172.16.0.0/12", "private", "the operator's own network (RFC 1918)"),
    _range("192.0.0.0/24", "protocol assignments", "not for hosts; some clouds serve metadata here (RFC 6890)"),
    _range("192.0.2.0/24", "documentation", "belongs to nobody (RFC 5737)"),
    _range("192.88.99.0/24", "6to4 relay", "tunnels to IPv6 (RFC 7526)"),
    _range("192.168.0.0/16", "private", "the operator's own network (RFC 1918)"),
    _range("198.18.0.0/15", "benchmarking", "laboratory networks (RFC 2544)"),
    _range("198.51.100.0/24", "documentation", "belongs to nobody (RFC 5737)"),
    _range("203.0.113.0/24", "documentation", "belongs to nobody (RFC 5737)"),
    _range("224.0.0.0/4", "multicast", "reaches neighbours on the operator's network (RFC 5771)"),
    _range("240.0.0.0/4", "reserved", "broadcast and addresses for nobody (RFC 1112)"),
)

BLOCKED_PORTS = {25: "SMTP", 465: "SMTPS", 587: "mail submission"}
"""TCP ports that no sandbox reaches: a sandbox that sends mail gets its host's addresses onto every block list."""


@dataclass(frozen=True, kw_only=True)
class Exemption:
    """An operator exception: one service in an always-blocked range that sandboxes may be allowed to reach.

    It lifts only the block. Policies judge it as any other destination, by `name` or address.
    """

    name: str
    address: ipaddress.IPv4Address
    port: int
    protocol: Literal["tcp", "udp"] = "tcp"


def blocked_reason(
    address: ipaddress.IPv4Address,
    *,
    protocol: str,
    port: int | None,
    exemptions: Iterable[Exemption] = (),
    host_addresses: Iterable[ipaddress.IPv4Address] = (),
) -> str | None:
    """The name of the block that holds, or None."""
    if any((rule.address, rule.protocol, rule.port) == (address, protocol, port) for rule in exemptions):
        return None
    if address in set(host_addresses):
        return "the host's own address"
    for blocked in ALWAYS_BLOCKED:
        if address in blocked.network:
            return blocked.name
    if protocol == "tcp" and port in BLOCKED_PORTS:
        return BLOCKED_PORTS[port]
    return None
