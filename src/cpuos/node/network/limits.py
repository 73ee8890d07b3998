"""How much of the network one sandbox may take. Caps of the kernel's rules: what is over them is refused or dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

__all__ = ["NetworkLimits"]


@dataclass(frozen=True, kw_only=True)
class NetworkLimits:
    concurrent_connections: int = 512
    """Entries in the connection table that the guest holds at once; those of UDP last some seconds longer."""
    new_connections_per_s: int = 200
    new_connections_burst: int = 400
    packets_per_s: int = 100_000
    """Sent by the guest. Segments are merged, so this is far above what bulk transfers need."""
    megabytes_per_s: int = 2500
    """Each way."""
    pings_per_s: int = 50
    names_per_s: int = 200
    """DNS questions, over UDP; over TCP, connections to the forwarder."""
    names_burst: int = 100
    named_addresses: int = 8192
    """Addresses open for their names at once, for each kind of port in the policy."""

    @classmethod
    def of_rates(
        cls, *, connections: int, new_connections_per_s: int, packets_per_s: int, megabytes_per_s: int, names_per_s: int
    ) -> Self:
        """What an operator sets; how much may come at once follows from it."""
        return cls(
            concurrent_connections=connections,
            new_connections_per_s=new_connections_per_s,
            new_connections_burst=2 * new_connections_per_s,
            packets_per_s=packets_per_s,
            megabytes_per_s=megabytes_per_s,
            names_per_s=names_per_s,
            names_burst=max(1, names_per_s // 2),
        )
