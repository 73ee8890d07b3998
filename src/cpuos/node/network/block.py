"""Which addresses an instance takes for its network: none that the host itself needs."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, NetmaskValueError
from pathlib import Path
from urllib.parse import urlsplit

from cpuos.errors import Conflict, InvalidRequest
from cpuos.node.network.netlink import Route, RouteNetlink
from cpuos.types.blocked import Exemption

__all__ = ["CANDIDATES", "Taken", "choose_block", "read_routes", "taken_addresses"]

CANDIDATES = tuple(
    block
    for network in ("10.231.0.0/16", "172.29.0.0/16", "100.113.0.0/16", "192.168.224.0/20")
    for block in IPv4Network(network).subnets(new_prefix=20)
)
"""In this order. Private ranges that are seldom used, each large enough for some thousand slots."""

_SMALLEST = 26
_URL = re.compile(r"https?://[^\s\"';,\]]+")
_NAMESERVER = re.compile(r"^\s*nameserver\s+(\S+)", re.MULTILINE)
# Where package managers are told of mirrors and proxies.
_MIRROR_FILES = (
    "etc/apt/sources.list",
    "etc/apt/sources.list.d/*",
    "etc/apt/apt.conf",
    "etc/apt/apt.conf.d/*",
    "etc/pip.conf",
    "root/.pip/pip.conf",
    "root/.config/pip/pip.conf",
    "etc/uv/uv.toml",
    "root/.config/uv/uv.toml",
    "root/.npmrc",
)
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Addresses that the host needs, and for what."""

    network: IPv4Network
    by: str
    """In words, as in "clashes with BY"."""


def choose_block(wanted: str, *, taken: Sequence[Taken], slots: int) -> IPv4Network:
    """The block for `slots` slots: the one that is set, or with "auto" the first candidate that meets nothing taken."""
    if wanted != "auto":
        block = _parse(wanted, slots=slots)
        clash = _clash(block, taken)
        if clash is not None:
            raise Conflict(
                f"cannot use the network block: {block}",
                f"it clashes with {clash.by} ({clash.network})",
                code="network_block_taken",
                details={"block": str(block), "taken_by": clash.by, "network": str(clash.network)},
            )
        return block
    for block in CANDIDATES:
        if block.num_addresses > slots + 8 and _clash(block, taken) is None:
            return block
    raise Conflict(
        "cannot choose a network block",
        f"each of the {len(CANDIDATES)} candidates clashes with a route or a service of this host, or is too small",
        code="network_block_taken",
        hint='set network_block = "A.B.C.0/20" to a network that this host does not use',
    )


def taken_addresses(
    routes: Iterable[Route], *, own_link: str, exemptions: Iterable[Exemption] = (), root: Path = Path("/")
) -> list[Taken]:
    """Everything that must stay reachable from this host; the link of an earlier daemon is not another's."""
    found = [
        Taken(network=route.network, by=f"the route over {route.device}" if route.device else "a route")
        for route in routes
        if route.network.prefixlen > 0 and route.device != own_link
    ]
    resolvers = _NAMESERVER.findall(_read(root / "etc/resolv.conf"))
    found += [
        _single(address, "the resolver in /etc/resolv.conf") for address in filter(None, map(_address, resolvers))
    ]
    found += [_single(rule.address, f"the network exception {rule.name}") for rule in exemptions]
    found += _mirrors(root)
    return found


def read_routes() -> list[Route]:
    """Of the namespace of the calling thread."""
    with RouteNetlink() as host:
        return host.routes()


def _parse(text: str, *, slots: int) -> IPv4Network:
    try:
        block = IPv4Network(text)
        if block.prefixlen > _SMALLEST:
            raise ValueError(f"a block has /{_SMALLEST} at least")
        if block.num_addresses <= slots + 8:
            raise ValueError(f"it has no room for {slots} slots, which max_sandboxes and network_pool ask for")
        if block.is_loopback or block.is_multicast or block.is_unspecified or block.network_address in _THIS_NETWORK:
            raise ValueError("these addresses cannot be routed")
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise InvalidRequest(
            f"cannot read network_block: {text!r}",
            str(error),
            hint='network_block = "auto", or such as "10.231.0.0/20"',
        ) from error
    return block


_THIS_NETWORK = IPv4Network("0.0.0.0/8")


def _clash(block: IPv4Network, taken: Sequence[Taken]) -> Taken | None:
    return next((entry for entry in taken if entry.network.overlaps(block)), None)


def _single(address: IPv4Address, by: str) -> Taken:
    return Taken(network=IPv4Network(address), by=by)


def _mirrors(root: Path) -> Iterator[Taken]:
    """Of mirrors that are given by name, those that /etc/hosts knows: a resolver may hang, and a start must not."""
    hosts = _read_hosts(root / "etc/hosts")
    for pattern in _MIRROR_FILES:
        for path in sorted(root.glob(pattern)):
            for url in _URL.findall(_read(path)):
                host = _host_of(url)
                address = _address(host) or hosts.get(host)
                if address is not None and not address.is_loopback:
                    yield _single(address, f"the mirror in /{path.relative_to(root)}")


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _read_hosts(path: Path) -> dict[str, IPv4Address]:
    found: dict[str, IPv4Address] = {}
    for line in _read(path).splitlines():
        words = line.partition("#")[0].split()
        address = _address(words[0]) if words else None
        if address is not None:
            found.update((name.lower(), address) for name in words[1:])
    return found


def _address(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(socket.inet_ntoa(socket.inet_pton(socket.AF_INET, text)))
    except (OSError, ValueError):
        return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
