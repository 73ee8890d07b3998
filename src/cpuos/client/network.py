"""Network: what a sandbox may reach, as a caller writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpuos.errors import InvalidRequest
from cpuos.types.network import NetworkMode

__all__ = ["Network", "network_values"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network policy. With `allow` only what it names is reached; without, everything but what `deny` names.

    Entries are host names (`api.example.com`, `*.example.com`) and addresses (`1.2.3.4`, `1.2.3.0/24`), each with a
    port or ports if wanted (`api.example.com:8443`, `1.2.3.0/24:1-1023/udp`). `deny` wins. Private ranges, cloud
    metadata and mail ports are blocked always.
    """

    allow: Sequence[str] | None = None
    deny: Sequence[str] = ()


def network_values(network: Any) -> dict[str, Any]:
    """The request's form of "internet", "off" or a `Network`; the entries are checked with the whole request."""
    if isinstance(network, Network):
        mode = NetworkMode.INTERNET if network.allow is None else NetworkMode.ALLOWLIST
        for name, entries in (("allow", network.allow), ("deny", network.deny)):
            if isinstance(entries, str):
                raise InvalidRequest(
                    f"cannot read network: {name}={entries!r}",
                    "it is a list of names and addresses",
                    hint=f"Network({name}=[{entries!r}])",
                    details={"field": f"network.{name}"},
                )
        return {"mode": mode, "allow": list(network.allow or ()), "deny": list(network.deny)}
    if network in (NetworkMode.INTERNET, NetworkMode.OFF):
        return {"mode": NetworkMode(network)}
    raise InvalidRequest(
        f"cannot read network: {network!r:.200}",
        'it is "internet", "off" or a Network',
        hint='network=Network(allow=["*.example.com"])',
        details={"field": "network"},
    )
