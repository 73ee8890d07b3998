"""Names that mean something only near the host, or nothing at all: answered here, never sent to a public resolver."""

from __future__ import annotations

import ipaddress

from cpuos.types.blocked import ALWAYS_BLOCKED

__all__ = ["RESOLVER_CANARY", "SPECIAL_NAMES", "special_name"]

SPECIAL_NAMES = {
    "alt": "not of the DNS (RFC 9476)",
    "corp": "an operator's own network",
    "home": "an operator's own network",
    "home.arpa": "a home's own network (RFC 8375)",
    "internal": "an operator's own network; clouds serve metadata here",
    "intranet": "an operator's own network",
    "invalid": "no name at all (RFC 6761)",
    "ip6.arpa": "sandboxes have no IPv6",
    "lan": "an operator's own network",
    "local": "multicast DNS (RFC 6762)",
    "localdomain": "the machine itself",
    "localhost": "the machine itself (RFC 6761)",
    "onion": "not of the DNS (RFC 7686)",
    "private": "an operator's own network",
    "resolver.arpa": "resolvers that upgrade to encrypted DNS (RFC 9462)",
}
"""Each with all names below it, and why."""

_REVERSE = ".in-addr.arpa"

RESOLVER_CANARY = "use-application-dns.net"
"""Browsers that find no such name leave their own encrypted DNS off."""


def special_name(name: str) -> str | None:
    """Why a name is not asked for anywhere; None for a name like any other."""
    if name and "." not in name:
        return SPECIAL_NAMES.get(name, "a name without a dot")
    last = name.rpartition(".")[2]
    for suffix in (last, ".".join(name.rsplit(".", 2)[-2:])):
        if suffix in SPECIAL_NAMES:
            return SPECIAL_NAMES[suffix]
    if name.endswith(_REVERSE):
        return _reverse(name.removesuffix(_REVERSE))
    return None


def _reverse(name: str) -> str | None:
    """Reverse zones within the always-blocked ranges."""
    numbers = []
    for part in name.split(".")[::-1][:4]:
        if not part.isdigit() or int(part) > 255:  # a zone cut within the last byte has a name there (RFC 2317)
            break
        numbers.append(int(part))
    if not numbers:
        return None
    bits = 8 * len(numbers)
    padded = bytes([*numbers, *[0] * (4 - len(numbers))])
    network = ipaddress.IPv4Network((padded, bits))
    for blocked in ALWAYS_BLOCKED:
        if network.subnet_of(blocked.network):
            return f"the reverse zone of addresses that are always blocked: {blocked.name}"
    return None
