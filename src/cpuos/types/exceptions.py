"""Operator exceptions as they are written in the settings: `NAME=ADDRESS:PORT` or `NAME=ADDRESS:PORT/udp`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address

from cpuos.errors import InvalidRequest
from cpuos.types.blocked import Exemption
from cpuos.types.targets import parse_target

__all__ = ["parse_exceptions"]

_WRITTEN = re.compile(r"(?P<name>[^=\s]+)=(?P<address>[0-9.]+):(?P<port>\d{1,5})(?:/(?P<protocol>tcp|udp))?")


def parse_exceptions(texts: Iterable[str]) -> tuple[Exemption, ...]:
    """Raises InvalidRequest that names the one that cannot be read."""
    return tuple(_parse(text) for text in texts)


def _parse(text: str) -> Exemption:
    match = _WRITTEN.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError("it must be NAME=ADDRESS:PORT, with /udp behind it for UDP")
        port = int(match["port"])
        name = parse_target(match["name"]).name
        if not 1 <= port <= 65535:
            raise ValueError(f"{port} is no port")
        if name is None or name.startswith("*."):
            raise ValueError(f"{match['name']!r} is no host name")
        protocol = "udp" if match["protocol"] == "udp" else "tcp"
        return Exemption(name=name, address=IPv4Address(match["address"]), port=port, protocol=protocol)
    except ValueError as error:
        raise InvalidRequest(
            f"cannot read the network exception: {text!r}",
            str(error),
            hint='network_exceptions = ["mirror.example.com=10.0.0.5:443"]',
        ) from error
