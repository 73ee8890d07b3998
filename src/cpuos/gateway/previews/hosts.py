"""The one reader of preview host names, and what a browser calls the same origin. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from cpuos.errors import Forbidden, InvalidRequest

__all__ = ["AGENT_PORT", "Place", "is_plain_address", "is_same_origin", "parse_host", "preview_host", "split_port"]

AGENT_PORT = 1
"""The agent's own: never a preview."""
MAX_HOST_BYTES = 255
_LABEL = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9]{20})")
_HOST = re.compile(rb"[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
_PORT = re.compile(rb"[1-9][0-9]{0,4}")
_DEFAULT_PORTS = {b"http": b"80", b"https": b"443"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a preview shows: one port of one sandbox."""

    sandbox: str
    port: int


def preview_host(place: Place, domain: str) -> str:
    """The host name under which a place is shown."""
    return f"{place.port}-{place.sandbox}.{domain}"


def parse_host(value: bytes, domain: str) -> Place:
    """The place that a Host header names: `{port}-{sandbox}.{domain}`, in any case, with any port behind it.

    One place has one spelling: no zeros before the port's number, no dot at the end.
    """
    name = split_port(value)[0].decode("ascii").lower()
    label, dot, rest = name.partition(".")
    match = _LABEL.fullmatch(label)
    if match is None or not dot or rest != domain:
        raise InvalidRequest(
            f"cannot find a preview for the host {name!r}",
            f"previews have names such as 3000-SANDBOX.{domain}",
            code="request_malformed",
            hint="sbx.ports.url(3000), or cpuos ports SANDBOX 3000",
        )
    port = int(match[1])
    if port > 65535:
        raise InvalidRequest(
            f"cannot find a preview for the host {name!r}", f"{port} is no port", code="request_malformed"
        )
    if port == AGENT_PORT:
        raise Forbidden(f"cannot show port {port} of the sandbox", "it is the sandbox's agent's own")
    return Place(sandbox=match[2], port=port)


def split_port(value: bytes) -> tuple[bytes, bytes]:
    """Name and port (may be empty) of a Host header or of an origin without its scheme."""
    name, colon, port = value.rpartition(b":")
    if not colon or name.endswith(b":") or (name.startswith(b"[") and not name.endswith(b"]")):
        name, port, colon = value, b"", b""
    fits = len(value) <= MAX_HOST_BYTES and _HOST.fullmatch(name) is not None
    if not fits or (colon and (_PORT.fullmatch(port) is None or int(port) > 65535)):
        raise InvalidRequest("cannot read the Host header", "it is no host name with a port", code="request_malformed")
    return name, port


def is_plain_address(value: bytes) -> bool:
    """Whether a Host header names no preview but this machine: an address, or `localhost`."""
    name = split_port(value)[0].decode("ascii").lower()
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Whether a page of this `Origin` was served under this `Host`. `null` and what cannot be read is not."""
    scheme, separator, rest = origin.lower().partition(b"://")
    default = _DEFAULT_PORTS.get(scheme)
    if not separator or default is None:
        return False
    try:
        theirs, ours = split_port(rest), split_port(host.lower())
    except InvalidRequest:
        return False
    return (theirs[0], theirs[1] or default) == (ours[0], ours[1] or default)
