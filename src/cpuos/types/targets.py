"""One entry of an allow or deny list: what a caller writes, and what it means.

TARGET[:PORT[-PORT]][/tcp|/udp]      api.example.com  *.example.com  files.example.com:8443  1.2.3.0/24:53/udp
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["NAME_PORTS", "Target", "parse_target"]

NAME_PORTS = (80, 443)
"""What a name without a port means (TCP): the ports where the name itself can be read off the connection."""

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_MAX_NAME = 253
_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Target:
    """Exactly one of `name` and `network` is set."""

    text: str
    """As it is shown: canonical, so that two spellings of one rule are equal."""
    name: str | None = None
    """Lower case, A-labels. `*.example.com` stands for every name below example.com, not for example.com itself."""
    network: ipaddress.IPv4Network | None = None
    ports: tuple[int, int] | None = None
    """First and last; None: all ports of an address, `NAME_PORTS` of a name."""
    protocol: Literal["tcp", "udp"] | None = None
    """None: both for an address, TCP for a name."""

    def covers_name(self, name: str) -> bool:
        """Whether this is a rule about `name` (lower case, no dot at its end)."""
        if self.name is None:
            return False
        if self.name.startswith("*."):
            return name.endswith(self.name[1:]) and len(name) > len(self.name) - 1
        return name == self.name

    def covers_address(self, address: ipaddress.IPv4Address) -> bool:
        return self.network is not None and address in self.network

    def covers_port(self, protocol: str, port: int | None, *, denying: bool = False) -> bool:
        """Whether protocol and port are among this rule's; `port` is None for ICMP.

        A name without a port means `NAME_PORTS` where it allows, and everything where it denies.
        """
        ports, wanted = self.ports, self.protocol
        if self.name is not None and not denying:
            wanted = wanted or "tcp"
            if ports is None:
                return protocol == wanted and port in NAME_PORTS
        if wanted is not None and protocol != wanted:
            return False
        return ports is None or _within(port, ports)


def parse_target(text: str) -> Target:
    """Raises ValueError in words for the one who wrote it."""
    rest = text.strip().lower()
    protocol: Literal["tcp", "udp"] | None = None
    for known in ("tcp", "udp"):
        if rest.endswith(f"/{known}"):
            protocol, rest = known, rest.removesuffix(f"/{known}")  # type: ignore[assignment]
    if "://" in rest:
        raise ValueError(f"{text!r} is a URL; write its host name alone, such as example.com or example.com:8443")
    place, ports = _cut_ports(rest, text)
    if not place:
        raise ValueError(f"{text!r} names nothing; write a name or an address")
    shown = (f":{_show(ports)}" if ports else "") + (f"/{protocol}" if protocol else "")
    network = _network(place, text)
    if network is not None:
        address = str(network.network_address) if network.prefixlen == 32 else str(network)
        return Target(text=address + shown, network=network, ports=ports, protocol=protocol)
    name = _name(place, text)
    return Target(text=name + shown, name=name, ports=ports, protocol=protocol)


def _cut_ports(rest: str, text: str) -> tuple[str, tuple[int, int] | None]:
    if rest.count(":") > 1:
        raise ValueError(f"{text!r} looks like IPv6, which sandboxes do not have")
    place, colon, tail = rest.partition(":")
    if not colon:
        return place, None
    match = _PORTS.fullmatch(tail)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= _MAX_PORT:
        raise ValueError(f"{text!r} has no port that is one: write 1 to {_MAX_PORT}, or first-last")
    return place, (first, last)


def _network(place: str, text: str) -> ipaddress.IPv4Network | None:
    if not re.fullmatch(r"[0-9./]+", place):
        return None
    try:
        return ipaddress.IPv4Network(place, strict=True)
    except ValueError as error:
        whole = _whole_network(place)
        if whole is None:
            raise ValueError(f"{text!r} is no IPv4 address or network: {error}") from None
        address = place.partition("/")[0]
        raise ValueError(f"{text!r} is an address within a network: write {whole}, or {address} alone") from None


def _whole_network(place: str) -> ipaddress.IPv4Network | None:
    """The network that an address with host bits lies in."""
    try:
        return ipaddress.IPv4Network(place, strict=False)
    except ValueError:
        return None


def _name(place: str, text: str) -> str:
    wildcard, rest = place.startswith("*."), place.removeprefix("*.").removesuffix(".")
    if "*" in rest or not rest:
        raise ValueError(f"{text!r} has a star where none may be: write *.example.com, or mode internet for every name")
    try:
        name = rest if rest.isascii() else rest.encode("idna").decode()
    except UnicodeError as error:
        raise ValueError(f"{text!r} is no host name: {error}") from None
    if re.fullmatch(r"[0-9.]+", name):  # digits of another alphabet: it would be read as an address the next time
        raise ValueError(f"{text!r} is no host name; write an address in plain digits")
    if len(name) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(f"{text!r} is no host name; write it without scheme or path")
    return f"*.{name}" if wildcard else name


def _show(ports: tuple[int, int]) -> str:
    return str(ports[0]) if ports[0] == ports[1] else f"{ports[0]}-{ports[1]}"


def _within(port: int | None, ports: tuple[int, int]) -> bool:
    return port is not None and ports[0] <= port <= ports[1]
