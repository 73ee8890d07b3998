"""What a policy says of one destination. Pure: the DNS forwarder, the TLS peek, the log reader and the cutting of
connections ask it, and the kernel rules are tested against it."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy
from cpuos.types.targets import NAME_PORTS, Target, parse_target

__all__ = ["BYPASSES", "Judge", "Judgement", "Layer", "Passage"]

BYPASSES = {
    ("udp", 53): "direct DNS",
    ("tcp", 53): "direct DNS",
    ("tcp", 853): "DNS over TLS",
    ("udp", 853): "DNS over QUIC",
    ("udp", 443): "QUIC",
}
"""Ways around the forwarder and the peek, closed where names decide: (protocol, port) and what it is."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    allowed: bool
    rule: str
    """In words, for records and refusals."""


class Passage(StrEnum):
    """What the kernel's rules do with the first packet of a connection."""

    REFUSED = "refused"
    DIRECT = "direct"
    PEEKED = "peeked"
    """Handed to the peek, which reads the name off the connection and asks `Judge.destination` about that name."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One policy of the effective one, with its lists read."""

    origin: str
    mode: NetworkMode
    allow: tuple[Target, ...]
    deny: tuple[Target, ...]

    @property
    def knows_names(self) -> bool:
        """Whether it judges by host name: an allowlist does, and whoever denies a name."""
        return self.mode is NetworkMode.ALLOWLIST or any(target.name for target in self.deny)

    def denies_name(self, name: str) -> Judgement | None:
        """The refusal when a name is denied on all ports."""
        denied = next((t for t in self.deny if t.covers_name(name) and not t.ports and not t.protocol), None)
        return Judgement(allowed=False, rule=f"{self.origin} deny {denied.text}") if denied is not None else None

    def allows_address(self, address: ipaddress.IPv4Address, *, protocol: str, port: int | None) -> bool:
        """Whether one of its address rules opens this; a policy that is no allowlist has none."""
        return any(t.covers_address(address) and t.covers_port(protocol, port) for t in self.allow)


class Judge:
    """Judges for one `EffectivePolicy`; cheap to ask, made once a version."""

    def __init__(self, policy: EffectivePolicy) -> None:
        self.version = policy.version
        self.layers = tuple(_layer(layer.origin, layer.policy) for layer in policy.layers)
        self.off = any(layer.mode is NetworkMode.OFF for layer in self.layers)
        self.allowlist = any(layer.mode is NetworkMode.ALLOWLIST for layer in self.layers)
        self.names_matter = any(layer.knows_names for layer in self.layers)
        """Connections are judged by host name too: the forwarder is the only resolver, TLS and HTTP names are read."""
        denied = [target for layer in self.layers for target in layer.deny if target.name]
        self.peeked_ports = tuple(
            port for port in NAME_PORTS if any(target.covers_port("tcp", port, denying=True) for target in denied)
        )
        """TCP ports where a denied name could stand behind any address, so the name of every connection is read."""

    def name(self, name: str) -> Judgement:
        """Whether a name may be resolved at all: some port of it is allowed, and it is not denied on all ports."""
        name = name.rstrip(".").lower()
        rule = "internet"
        for layer in self.layers:
            denied = layer.denies_name(name)
            if denied is not None:
                return denied
            if layer.mode is NetworkMode.OFF:
                return Judgement(allowed=False, rule=f"{layer.origin} network off")
            if layer.mode is NetworkMode.ALLOWLIST:
                allowed = next((t for t in layer.allow if t.covers_name(name)), None)
                if allowed is None:
                    return Judgement(allowed=False, rule=f"not in the {layer.origin} allow list")
                rule = f"{layer.origin} allow {allowed.text}"
        return Judgement(allowed=True, rule=rule)

    def alias(self, name: str) -> Judgement | None:
        """The refusal of a name that an allowed one is an alias of: it need not be allowed itself, but not denied."""
        name = name.rstrip(".").lower()
        return next((denied for layer in self.layers if (denied := layer.denies_name(name)) is not None), None)

    def destination(
        self, address: ipaddress.IPv4Address, *, protocol: str, port: int | None, names: Collection[str] = ()
    ) -> Judgement:
        """A connection to an address; `names`: the host names it stands for, as far as they are known.

        `protocol` is tcp, udp or icmp. What is always blocked is not looked at here.
        """
        rule = "internet"
        for layer in self.layers:
            judgement = _judge(layer, address, protocol, port, names)
            if not judgement.allowed:
                return judgement
            if layer.mode is NetworkMode.ALLOWLIST or rule == "internet":
                rule = judgement.rule
        bypass = BYPASSES.get((protocol, port or 0))
        if bypass and not all(
            layer.allows_address(address, protocol=protocol, port=port) for layer in self.layers if layer.knows_names
        ):
            return Judgement(allowed=False, rule=f"{bypass} while names decide")
        return Judgement(allowed=True, rule=rule)

    def passage(
        self, address: ipaddress.IPv4Address, *, protocol: str, port: int | None, names: Collection[str] = ()
    ) -> Passage:
        """What the kernel does, knowing that the forwarder told the guest this address for `names`.

        What is always blocked is not looked at here.
        """
        if protocol != "tcp" or not self._is_peeked(address, port):
            judgement = self.destination(address, protocol=protocol, port=port, names=names)
            return Passage.DIRECT if judgement.allowed else Passage.REFUSED
        # A denied name may share its address with an allowed one: which it is, the peek will read.
        for layer in self.layers:
            denied = any(t.covers_address(address) and t.covers_port("tcp", port, denying=True) for t in layer.deny)
            if denied or not _grant(layer, address, "tcp", port, names).allowed:
                return Passage.REFUSED
        if ("tcp", port) in BYPASSES:
            return Passage.REFUSED
        return Passage.PEEKED

    def _is_peeked(self, address: ipaddress.IPv4Address, port: int | None) -> bool:
        """A denied name could be behind it, or it is open for its name and not for its address."""
        lists = [layer for layer in self.layers if layer.mode is NetworkMode.ALLOWLIST]
        by_address = all(layer.allows_address(address, protocol="tcp", port=port) for layer in lists)
        return port in self.peeked_ports or not by_address

    def follows(self, name: str) -> bool:
        """Whether the rules need to know the addresses of this name: an allow list opens them, or a deny closes some of
        their ports."""
        name = name.rstrip(".").lower()
        return any(target.covers_name(name) for layer in self.layers for target in (*layer.allow, *layer.deny))

    def name_ports(self, name: str) -> list[tuple[str, int, int]]:
        """(protocol, first, last) that the allow lists open for an allowed name's addresses: what every allowlist layer
        grants. Empty where no layer is an allowlist, or the name is not allowed."""
        if not self.allowlist or not self.name(name).allowed:
            return []
        name = name.rstrip(".").lower()
        grants: list[tuple[str, int, int]] | None = None
        for layer in self.layers:
            if layer.mode is NetworkMode.ALLOWLIST:
                own = [span for target in layer.allow if target.covers_name(name) for span in _spans(target)]
                grants = own if grants is None else _overlap(grants, own)
        return sorted(set(grants or []))


def _layer(origin: str, policy: NetworkPolicy) -> Layer:
    return Layer(
        origin=origin,
        mode=policy.mode,
        allow=tuple(parse_target(text) for text in policy.allow),
        deny=tuple(parse_target(text) for text in policy.deny),
    )


def _judge(
    layer: Layer, address: ipaddress.IPv4Address, protocol: str, port: int | None, names: Collection[str]
) -> Judgement:
    for target in layer.deny:
        if _covers(target, address, names) and target.covers_port(protocol, port, denying=True):
            return Judgement(allowed=False, rule=f"{layer.origin} deny {target.text}")
    return _grant(layer, address, protocol, port, names)


def _grant(
    layer: Layer, address: ipaddress.IPv4Address, protocol: str, port: int | None, names: Collection[str]
) -> Judgement:
    """What mode and allow list say, before any deny."""
    if layer.mode is NetworkMode.OFF:
        return Judgement(allowed=False, rule=f"{layer.origin} network off")
    if layer.mode is NetworkMode.INTERNET:
        return Judgement(allowed=True, rule="internet")
    for target in layer.allow:
        if _covers(target, address, names) and target.covers_port(protocol, port):
            return Judgement(allowed=True, rule=f"{layer.origin} allow {target.text}")
    return Judgement(allowed=False, rule=f"not in the {layer.origin} allow list")


def _covers(target: Target, address: ipaddress.IPv4Address, names: Collection[str]) -> bool:
    return target.covers_address(address) or any(target.covers_name(name) for name in names)


def _spans(target: Target) -> list[tuple[str, int, int]]:
    protocol = target.protocol or "tcp"
    return [(protocol, *target.ports)] if target.ports else [(protocol, port, port) for port in (80, 443)]


def _overlap(left: list[tuple[str, int, int]], right: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    met = [(a[0], max(a[1], b[1]), min(a[2], b[2])) for a in left for b in right if a[0] == b[0]]
    return [span for span in met if span[1] <= span[2]]
