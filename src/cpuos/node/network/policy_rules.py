"""From a policy to the nft rules that hold it. Pure; `Judge.passage` says what they must do, and tests compare the two.

Targets are grouped by protocol and ports, so that each group is one rule with one set of addresses: nothing overlaps.
Addresses that names were answered with lie in sets of their own, with time-outs, one for each layer and group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, collapse_addresses

from cpuos.node.network.judge import BYPASSES, Judge
from cpuos.node.network.rules import DIRECT, MAX_LAYERS, PEEKED, TABLE, verdict_rules
from cpuos.types.network import NetworkMode
from cpuos.types.targets import NAME_PORTS, Target

__all__ = ["NamedAddress", "learn_rules", "name_set_names", "policy_rules"]

_EVERYTHING = IPv4Network("0.0.0.0/0")
_MAX_TTL_S = 604_800


@dataclass(frozen=True, kw_only=True)
class NamedAddress:
    """The forwarder answered `name` with `address`."""

    name: str
    address: IPv4Address
    ttl_s: int
    """With 0 it opens nothing: it was known once."""


@dataclass(frozen=True)
class _Group:
    """Targets that mean the same protocol and ports; as rule text."""

    match: str
    targets: tuple[Target, ...]

    @property
    def networks(self) -> list[IPv4Network]:
        return list(collapse_addresses(target.network for target in self.targets if target.network is not None))


@dataclass(frozen=True)
class _NameSet:
    """A set of addresses that are open, or denied, for their names."""

    set_name: str
    group: _Group

    def addresses(self, learned: Iterable[NamedAddress]) -> dict[IPv4Address, int]:
        found: dict[IPv4Address, int] = {}
        for entry in learned:
            if entry.ttl_s > 0 and any(target.covers_name(entry.name) for target in self.group.targets):
                found[entry.address] = max(found.get(entry.address, 1), min(entry.ttl_s, _MAX_TTL_S))
        return found


def policy_rules(
    judge: Judge,
    *,
    generation: int,
    learned: Collection[NamedAddress] = (),
    replaced: Collection[str] = (),
    named_addresses: int = 8192,
) -> str:
    """One transaction after which the router holds this policy and no other.

    `generation` tells its sets of names apart from those of the policy before, which are `replaced`.
    """
    chains = [f"layer_{number}" for number in range(MAX_LAYERS)]
    lines = [f"flush chain ip {TABLE} {chain}" for chain in (*chains, "layers", "open")]
    lines += [f"delete set ip {TABLE} {name}" for name in replaced]
    for name_set in _name_sets(judge, generation):
        entries = ", ".join(_element(*entry) for entry in name_set.addresses(learned).items())
        elements = f" elements = {{ {entries} }};" if entries else ""
        declared = f"type ipv4_addr; flags timeout; size {named_addresses};{elements}"
        lines.append(f"add set ip {TABLE} {name_set.set_name} {{ {declared} }}")
    if not judge.off:
        lines += [f"add rule ip {TABLE} {rule}" for rule in _rules(judge, generation)]
    return "\n".join(lines) + "\n" + verdict_rules(judge.version)


def name_set_names(judge: Judge, generation: int) -> list[str]:
    """What `replaced` has to say once this policy is replaced."""
    return [name_set.set_name for name_set in _name_sets(judge, generation)]


def learn_rules(judge: Judge, learned: Collection[NamedAddress], *, generation: int) -> str:
    """Open, or deny, what the policy says of these names. Empty where it says nothing of them.

    An address that is there already gets the new time-out, which kernels before 6.12 do only for one taken out first.
    """
    lines = []
    for name_set in _name_sets(judge, generation):
        addresses = name_set.addresses(learned)
        if addresses:
            where = f"element ip {TABLE} {name_set.set_name}"
            timed = ", ".join(_element(*entry) for entry in addresses.items())
            plain = ", ".join(str(address) for address in addresses)
            lines += [f"add {where} {{ {timed} }}", f"delete {where} {{ {plain} }}", f"add {where} {{ {timed} }}"]
    return "\n".join(lines) + "\n" if lines else ""


def _rules(judge: Judge, generation: int) -> list[str]:
    """`layers` refuses what is denied; each allowlist has a chain; what passes all of them comes to `open`."""
    sets = {name_set.set_name: name_set for name_set in _name_sets(judge, generation)}
    rules = [
        f"layers {group.match} {_destinations(group.networks)} return"
        for layer in judge.layers
        for group in _groups(target for target in layer.deny if target.network is not None)
    ]
    lists = [number for number, layer in enumerate(judge.layers) if layer.mode is NetworkMode.ALLOWLIST]
    steps = [*(f"layer_{number}" for number in lists), "open"]
    rules += [f"layers meta mark set {DIRECT}", f"layers goto {steps[0]}"]
    for number, chain, following in zip(lists, steps, steps[1:], strict=False):
        rules += [
            f"{chain} {group.match} {_destinations(group.networks)} goto {following}"
            for group in _groups(target for target in judge.layers[number].allow if target.network is not None)
        ]
        rules += [
            f"{chain} {sets[name].group.match} ip daddr @{name} meta mark set {PEEKED} goto {following}"
            for name in sets
            if name.startswith(f"named_{number}_")
        ]
        rules.append(f"{chain} meta mark set 0")
    return rules + _open_rules(judge, sets)


def _open_rules(judge: Judge, sets: dict[str, _NameSet]) -> list[str]:
    """The mark says `PEEKED` here where a layer allows for a name only."""
    rules = []
    if judge.names_matter:
        # A layer that denies names and has no allow list cannot have named the address itself.
        only_named = all(layer.mode is NetworkMode.ALLOWLIST for layer in judge.layers if layer.knows_names)
        condition = f"meta mark {PEEKED} " if only_named else ""
        rules += [
            f"open {condition}{protocol} dport {_ports(port for kind, port in BYPASSES if kind == protocol)} "
            "meta mark set 0 return"
            for protocol in ("tcp", "udp")
        ]
    if judge.peeked_ports:
        rules.append(f"open tcp dport {_ports(judge.peeked_ports)} meta mark set {PEEKED} return")
    if judge.allowlist:
        rules.append(f"open meta mark {PEEKED} meta l4proto tcp return")
    rules += [
        f"open {sets[name].group.match} ip daddr @{name} meta mark set 0 return"
        for name in sets
        if name.startswith("denied_")
    ]
    return [*rules, f"open meta mark set {DIRECT}"]


def _name_sets(judge: Judge, generation: int) -> list[_NameSet]:
    sets = []
    for number, layer in enumerate(judge.layers):
        kinds: tuple[tuple[str, Sequence[_Group]], ...] = (
            ("named", _groups(target for target in layer.allow if target.name is not None)),
            ("denied", _groups((t for t in layer.deny if t.name is not None), denying=True)),
        )
        for kind, groups in kinds:
            sets += [_NameSet(f"{kind}_{number}_{index}_{generation}", group) for index, group in enumerate(groups)]
    return sets


def _groups(targets: Iterable[Target], *, denying: bool = False) -> list[_Group]:
    found: dict[str, list[Target]] = {}
    for target in targets:
        found.setdefault(_match(target, denying=denying), []).append(target)
    return [_Group(match, tuple(members)) for match, members in found.items()]


def _match(target: Target, *, denying: bool) -> str:
    """As `Target.covers_port` has it."""
    protocol: str | None = target.protocol
    ports = "-".join(str(port) for port in dict.fromkeys(target.ports)) if target.ports else None
    if target.name is not None and not denying:
        protocol = protocol or "tcp"
        ports = ports or _ports(NAME_PORTS)
    if ports is None:
        return f"meta l4proto {protocol}" if protocol else ""
    return f"{protocol} dport {ports}" if protocol else f"meta l4proto {{ tcp, udp }} th dport {ports}"


def _destinations(networks: Sequence[IPv4Network]) -> str:
    if _EVERYTHING in networks:
        return ""
    return f"ip daddr {{ {', '.join(str(network) for network in networks)} }}"


def _ports(ports: Iterable[int]) -> str:
    return f"{{ {', '.join(str(port) for port in sorted(ports))} }}"


def _element(address: IPv4Address, ttl_s: int) -> str:
    return f"{address} timeout {ttl_s}s"
