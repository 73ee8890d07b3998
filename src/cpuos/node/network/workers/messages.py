"""What node and workers say to each other, one class an operation. What a worker says is hostile: numbers, ids, names
in their own alphabets, in lists with an end."""

from __future__ import annotations

import ipaddress
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.surroundings import EVERYWHERE
from cpuos.node.network.workers.channel import Message
from cpuos.types.blocked import Exemption
from cpuos.types.network import EffectivePolicy

__all__ = [
    "Close",
    "EndFlows",
    "EndedFlow",
    "Host",
    "Hub",
    "Learn",
    "Learned",
    "LearnedAddress",
    "LearnedName",
    "Open",
    "Ping",
    "PolicyChange",
    "RouterCounts",
    "Sockets",
    "Start",
    "WantCounts",
    "WantSockets",
]

SandboxId = Annotated[str, Field(pattern=r"^[a-z0-9]{20}$")]
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9_.-]+$")]
"""A host name as the judge wants it: lower case, A-labels, no dot at its end."""
Seconds = Annotated[int, Field(ge=0, le=604_800)]


class Start(Message):
    """The first call to every worker. Descriptors: its feed to or from the records worker, as the worker says."""

    op: ClassVar[str] = "start"
    resolvers: list[ipaddress.IPv4Address] = Field(default_factory=list)
    """dns: who is asked, in this order."""
    resolver_port: int = Field(default=53, ge=1, le=65535)
    host_addresses: list[ipaddress.IPv4Address] = Field(default_factory=list)
    reach: list[ipaddress.IPv4Network] = Field(default=list(EVERYWHERE))
    """Where the host has a way to."""
    state_dir: str = ""
    """records: where its journal lies."""
    socket_path: str = ""
    """records: where it serves."""
    peer_uids: list[int] = Field(default_factory=list)
    """records: who may ask there, beside root."""
    limits: NetworkLimits = NetworkLimits()
    """dns, peek and uplink: what the kernel lets one sandbox have; theirs follow from it."""
    exemptions: list[Exemption] = Field(default_factory=list)
    """uplink: what it dials of always-blocked ranges."""


class Ping(Message):
    """Whether the worker still gets round."""

    op: ClassVar[str] = "ping"


class Host(Message):
    """The host's own addresses have changed, or where it has a way to."""

    op: ClassVar[str] = "host"
    host_addresses: list[ipaddress.IPv4Address]
    reach: list[ipaddress.IPv4Network] = Field(default=list(EVERYWHERE))


class LearnedName(Message):
    name: Name
    address: ipaddress.IPv4Address
    ttl_s: Seconds


class Open(Message):
    """Serve a sandbox; one that is served already is opened anew with these descriptors."""

    op: ClassVar[str] = "open"
    sandbox: SandboxId
    policy: EffectivePolicy
    exemptions: list[Exemption] = Field(default_factory=list)
    """dns answers their names itself."""
    slot_address: ipaddress.IPv4Address | None = None
    """records: the source address of its flows in the hub."""
    is_new: bool = False
    """records: nothing has passed this router yet. The sandbox may have had another before, that counted for itself."""
    learned: list[LearnedName] = Field(default_factory=list, max_length=4096)
    """dns and records: what an earlier forwarder told the guest, oldest first."""


class PolicyChange(Message):
    op: ClassVar[str] = "policy"
    sandbox: SandboxId
    policy: EffectivePolicy


class RouterCounts(Message):
    """records: what the router of a sandbox has counted since it was made. What was not recorded of it is a gap."""

    op: ClassVar[str] = "counters"
    sandbox: SandboxId
    allowed: int = Field(ge=0)
    """Packets logged as allowed."""
    refused: int = Field(ge=0)
    """Packets that were refused, over a limit included; the log of them has a limit of its own."""
    is_beginning: bool = False
    """The rules were made anew: these are what later ones are compared with."""


class Close(Message):
    """Forget a sandbox and close its descriptors; one that is not known is fine."""

    op: ClassVar[str] = "close"
    sandbox: SandboxId


class EndedFlow(Message):
    """As the hub sees it: the slot's source port, and where it went."""

    protocol: Literal["tcp", "udp"]
    source_port: int = Field(ge=0, le=65535)
    address: ipaddress.IPv4Address
    port: int = Field(ge=0, le=65535)


class EndFlows(Message):
    """uplink: break off connections of a slot; without `flows`, all of them."""

    op: ClassVar[str] = "end"
    slot_address: ipaddress.IPv4Address
    flows: list[EndedFlow] | None = None


class Sockets(Message):
    """peek: unconnected TCP sockets made in the sandbox's router namespace."""

    op: ClassVar[str] = "sockets"
    sandbox: SandboxId


class Hub(Message):
    """records: the conntrack event socket of the hub."""

    op: ClassVar[str] = "hub"


class LearnedAddress(Message):
    address: ipaddress.IPv4Address
    ttl_s: Seconds


class Learned(Message):
    """dns answers `policy`: all that it told the guest, oldest first; with no seconds left where it is not to open
    anything any more."""

    learned: list[LearnedName] = Field(max_length=4096)


class Learn(Message):
    """dns asks: open an allowed name's addresses, before the guest hears of them."""

    op: ClassVar[str] = "learn"
    sandbox: SandboxId
    name: Name
    addresses: list[LearnedAddress] = Field(min_length=1, max_length=64)


class WantCounts(Message):
    """records asks for the router's counters, which come as `RouterCounts`: there may be more than was logged."""

    op: ClassVar[str] = "counts"
    sandbox: SandboxId


class WantSockets(Message):
    """peek asks for stock."""

    op: ClassVar[str] = "sockets"
    sandbox: SandboxId
    count: int = Field(ge=1, le=64)
