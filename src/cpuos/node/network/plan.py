"""Addresses and device names of an instance's network; ADR 0008 has the picture.

host:   cpuosINST .1/30  ══ veth ══  host .2/30      :hub
hub:    uN               ══ veth ══  wan ADDRESS/32  :router N
router: lan 10.0.0.1/30  ══ veth ══  eth0 10.0.0.2/30 :guest N
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Literal

__all__ = [
    "GUEST_MAC",
    "HUB_MAC",
    "LAN",
    "ROUTER_MAC",
    "SLOT_PREFIX",
    "UPLINK",
    "WAN",
    "WAN_MAC",
    "BlockPlan",
    "SlotPlan",
    "UplinkKind",
    "host_link",
    "host_table",
]

WAN, LAN = "wan", "lan"
"""The two devices of a router."""
UPLINK = "host"
"""The hub's device towards the host."""
UplinkKind = Literal["nat", "user", "none"]
"""As in the settings: what that device is. A link to the host, which masquerades; the end of a process that makes
ordinary sockets there; nothing."""
SLOT_PREFIX = "u"
"""The hub's device towards slot N is uN."""

# The same in every slot: nothing has to be asked for or learned, so nothing can be answered wrongly.
ROUTER_MAC, GUEST_MAC = "02:00:0a:00:00:01", "02:00:0a:00:00:02"
HUB_MAC, WAN_MAC = "02:00:0a:00:00:03", "02:00:0a:00:00:04"

_FIRST_SLOT = 4


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """One slot: what its router is called by the hub, and where it finds the hub."""

    number: int
    address: IPv4Address
    """The router's own on `wan`; all that leaves the slot has it as its source."""
    hub_address: IPv4Address
    """The next hop."""

    @property
    def hub_device(self) -> str:
        return f"{SLOT_PREFIX}{self.number}"


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The first four addresses join host and hub; each of the others is one slot's, inside the hub only."""

    network: IPv4Network

    @property
    def host_address(self) -> IPv4Address:
        return self.network[1]

    @property
    def hub_address(self) -> IPv4Address:
        return self.network[2]

    @property
    def link_network(self) -> IPv4Network:
        """All that the host's routes ever know of the block."""
        return IPv4Network((self.network.network_address, 30))

    @property
    def slots(self) -> int:
        """How many slots there can be; their numbers are 0 to this, without it."""
        return self.network.num_addresses - _FIRST_SLOT - 1

    def slot(self, number: int) -> SlotPlan:
        if not 0 <= number < self.slots:
            raise ValueError(f"slot {number} is outside of {self.network}")
        return SlotPlan(number=number, address=self.network[_FIRST_SLOT + number], hub_address=self.hub_address)


def host_link(instance_id: str) -> str:
    """The one device that an instance adds to its host."""
    return f"cpuos{instance_id}"


def host_table(instance_id: str) -> str:
    """The one nft table (family ip) that an instance adds to its host."""
    return f"cpuos_{instance_id}"
