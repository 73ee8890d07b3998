"""What of the host matters to all its sandboxes, and changes as the host's own network does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, collapse_addresses

from cpuos.node.network.netlink import Route, RouteNetlink
from cpuos.node.network.plan import UplinkKind

__all__ = ["EVERYWHERE", "NO_UPLINK", "Surroundings", "is_reached", "reach_of", "read_surroundings"]

EVERYWHERE = (IPv4Network("0.0.0.0/1"), IPv4Network("128.0.0.0/1"))
"""In halves: the kernel's sets have no element that is everything."""
NO_UPLINK = "no uplink"
"""The rule of what a policy allows and the host has no way to."""
_MOST_NETWORKS = 500


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    addresses: tuple[IPv4Address, ...] = ()
    """The host's own: no sandbox reaches them."""
    reach: tuple[IPv4Network, ...] = EVERYWHERE
    """Where the host has a way to. The rest is refused as `NO_UPLINK`, instead of being sent to nowhere."""


def read_surroundings(uplink: UplinkKind, *, own_link: str) -> Surroundings:
    """Of the namespace of the calling thread."""
    with RouteNetlink() as host:
        addresses = tuple(sorted({address.ip for _, address in host.addresses() if not address.ip.is_loopback}))
        reach = reach_of(host.routes(), own_link=own_link) if uplink != "none" else ()
    return Surroundings(addresses=addresses, reach=reach)


def reach_of(routes: Iterable[Route], *, own_link: str) -> tuple[IPv4Network, ...]:
    """Of whichever table: which rule chooses it is not looked at, so something may count as reached that is not."""
    ways = [route.network for route in routes if route.is_way and route.device != own_link]
    if any(network.prefixlen == 0 for network in ways):
        return EVERYWHERE
    networks = tuple(collapse_addresses(ways))
    return networks if networks[:1] != (IPv4Network("0.0.0.0/0"),) and len(networks) <= _MOST_NETWORKS else EVERYWHERE


def is_reached(address: IPv4Address, reach: Iterable[IPv4Network]) -> bool:
    return any(address in network for network in reach)
