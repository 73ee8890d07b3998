"""Entries of an allow list that could open nothing, since it is always blocked: they are refused, not kept in silence.

Who writes `10.0.0.0/8` or `localhost` wants something that no policy gives, and would look for the fault elsewhere.
What an operator has excepted in that place makes the entry a good one. A deny list may name what it likes.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Network, collapse_addresses

from cpuos.errors import InvalidRequest
from cpuos.types.blocked import ALWAYS_BLOCKED, BLOCKED_PORTS, Exemption
from cpuos.types.network import NetworkPolicy
from cpuos.types.special_names import special_name
from cpuos.types.targets import Target, parse_target

__all__ = ["check_allow_list", "why_shut"]

_SHUT = tuple(collapse_addresses(blocked.network for blocked in ALWAYS_BLOCKED))


def check_allow_list(policy: NetworkPolicy, *, exemptions: Collection[Exemption], field: str = "allow") -> None:
    """Raise InvalidRequest that names the first entry which opens nothing, and why."""
    for text in policy.allow:
        reason = why_shut(parse_target(text), exemptions=exemptions)
        if reason is not None:
            raise InvalidRequest(
                f"cannot allow {text}: always blocked ({reason})",
                "no policy opens that; only an operator does, for one service (setting network_exceptions)",
                hint="cpuos doctor shows what the operator has excepted",
                details={"field": field, "entry": text, "blocked": reason},
            )


def why_shut(target: Target, *, exemptions: Collection[Exemption] = ()) -> str | None:
    """Why this entry opens nothing at all; None where it opens something, be it a single service."""
    if any(_covers(target, exemption) for exemption in exemptions):
        return None
    if target.network is not None and any(target.network.subnet_of(shut) for shut in _SHUT):
        return _name_of(target.network)
    if target.name is not None:
        wildcard = target.name.startswith("*.")
        special = special_name(target.name.replace("*", "any", 1) if wildcard else target.name)
        if special is not None:
            return special
    return _shut_port(target)


def _covers(target: Target, exemption: Exemption) -> bool:
    place = target.covers_name(exemption.name) or target.covers_address(exemption.address)
    return place and target.covers_port(exemption.protocol, exemption.port)


def _name_of(network: IPv4Network) -> str:
    return next(blocked.name for blocked in ALWAYS_BLOCKED if blocked.network.overlaps(network))


def _shut_port(target: Target) -> str | None:
    """Of mail. An address without a protocol is open for UDP too."""
    protocol = target.protocol or ("tcp" if target.name is not None else None)
    if protocol != "tcp" or target.ports is None:
        return None
    first, last = target.ports
    if last - first >= len(BLOCKED_PORTS) or not all(port in BLOCKED_PORTS for port in range(first, last + 1)):
        return None
    return BLOCKED_PORTS[first]
