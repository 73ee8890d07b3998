"""What a policy says of one destination. Pure: the DNS forwarder, the TLS peek, the log reader and the cutting of
connections ask it, and the kernel rules are tested against it."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass

from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy
from cpuos.types.targets import Target, parse_target

__all__ = ["Judge", "Judgement"]

# Where names decide, ways around the forwarder are closed: DNS to others (53), DNS over TLS (853), QUIC (443/udp).
_BYPASSES = {("udp", 53): "direct DNS", ("tcp", 53): "direct DNS", ("tcp", 853): "DNS over TLS"}
_BYPASSES |= {("udp", 853): "DNS over QUIC", ("udp", 443): "QUIC"}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    allowed: bool
    rule: str
    """In words, for records and refusals."""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    origin: str
    mode: NetworkMode
    allow: tuple[Target, ...]
    deny: tuple[Target, ...]


class Judge:
    """Judges for one `EffectivePolicy`; cheap to ask, made once a version."""

    def __init__(self, policy: EffectivePolicy) -> None:
        self.version = policy.version
        self._layers = [_layer(layer.origin, layer.policy) for layer in policy.layers]
        self.off = any(layer.mode is NetworkMode.OFF for layer in self._layers)
        self.allowlist = any(layer.mode is NetworkMode.ALLOWLIST for layer in self._layers)
        self.names_matter = self.allowlist or any(target.name for layer in self._layers for target in layer.deny)
        """Connections are judged by host name too: the forwarder is the only resolver, TLS and HTTP names are read."""

    def name(self, name: str) -> Judgement:
        """Whether a name may be resolved at all: some port of it is allowed, and it is not denied on all ports."""
        name = name.rstrip(".").lower()
        rule = "internet"
        for layer in self._layers:
            denied = next((t for t in layer.deny if t.covers_name(name) and t.ports is None), None)
            if denied is not None:
                return Judgement(allowed=False, rule=f"{layer.origin} deny {denied.text}")
            if layer.mode is NetworkMode.OFF:
                return Judgement(allowed=False, rule=f"{layer.origin} network off")
            if layer.mode is NetworkMode.ALLOWLIST:
                allowed = next((t for t in layer.allow if t.covers_name(name)), None)
                if allowed is None:
                    return Judgement(allowed=False, rule=f"not in the {layer.origin} allow list")
                rule = f"{layer.origin} allow {allowed.text}"
        return Judgement(allowed=True, rule=rule)

    def destination(
        self, address: ipaddress.IPv4Address, *, protocol: str, port: int | None, names: Collection[str] = ()
    ) -> Judgement:
        """A connection to an address; `names`: the host names it stands for, as far as they are known.

        `protocol` is tcp, udp or icmp. What is always blocked is not looked at here.
        """
        rule = "internet"
        for layer in self._layers:
            judgement = _judge(layer, address, protocol, port, names)
            if not judgement.allowed:
                return judgement
            if layer.mode is NetworkMode.ALLOWLIST or rule == "internet":
                rule = judgement.rule
        if self.names_matter and (protocol, port) in _BYPASSES and not self._address_allowed(address, protocol, port):
            return Judgement(allowed=False, rule=f"{_BYPASSES[protocol, port or 0]} while names decide")
        return Judgement(allowed=True, rule=rule)

    def name_ports(self, name: str) -> list[tuple[str, int, int]]:
        """(protocol, first, last) that the allow lists open for an allowed name's addresses: what every allowlist layer
        grants. Empty where no layer is an allowlist, or the name is not allowed."""
        if not self.allowlist or not self.name(name).allowed:
            return []
        name = name.rstrip(".").lower()
        grants: list[tuple[str, int, int]] | None = None
        for layer in self._layers:
            if layer.mode is NetworkMode.ALLOWLIST:
                own = [span for target in layer.allow if target.covers_name(name) for span in _spans(target)]
                grants = own if grants is None else _overlap(grants, own)
        return sorted(set(grants or []))

    def _address_allowed(self, address: ipaddress.IPv4Address, protocol: str, port: int | None) -> bool:
        """Every allowlist layer names the address itself."""
        lists = [layer for layer in self._layers if layer.mode is NetworkMode.ALLOWLIST]
        return bool(lists) and all(
            any(t.covers_address(address) and t.covers_port(protocol, port) for t in layer.allow) for layer in lists
        )


def _layer(origin: str, policy: NetworkPolicy) -> _Layer:
    return _Layer(
        origin=origin,
        mode=policy.mode,
        allow=tuple(parse_target(text) for text in policy.allow),
        deny=tuple(parse_target(text) for text in policy.deny),
    )


def _judge(
    layer: _Layer, address: ipaddress.IPv4Address, protocol: str, port: int | None, names: Collection[str]
) -> Judgement:
    for target in layer.deny:
        if _covers(target, address, names) and target.covers_port(protocol, port, denying=True):
            return Judgement(allowed=False, rule=f"{layer.origin} deny {target.text}")
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
