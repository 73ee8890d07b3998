"""What the uplink opens no socket to, whatever came through the rules before it.

The third to say so, after router and hub, and the only one that asks the kernel about each destination: an address that
the host was given a moment ago is its own already.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Address

from cpuos.node.network.netlink import RouteNetlink
from cpuos.types.blocked import Exemption, blocked_reason

__all__ = ["Guard"]


class Guard:
    """Made in the host's namespace, where the sockets are made too."""

    def __init__(self, *, exemptions: Collection[Exemption], host_addresses: Collection[IPv4Address]) -> None:
        self._exemptions = tuple(exemptions)
        self.host_addresses = frozenset(host_addresses)
        self._routes = RouteNetlink()

    def close(self) -> None:
        self._routes.close()

    def allows(self, address: IPv4Address, *, protocol: str, port: int | None) -> bool:
        blocked = blocked_reason(
            address, protocol=protocol, port=port, exemptions=self._exemptions, host_addresses=self.host_addresses
        )
        return blocked is None and self._routes.leads_away(address)
