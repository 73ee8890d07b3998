"""What one sandbox's clients may have open at once. Kill, stat and wait take no slot, so they always get through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cpuos.errors import LimitReached

__all__ = ["GatewayLimits", "Slots"]


@dataclass(frozen=True, kw_only=True)
class GatewayLimits:
    """Per sandbox, except where said."""

    commands: int = 64
    streams: int = 128
    watches: int = 16
    ptys: int = 16
    transfers: int = 64
    """File bodies on their way, both directions."""
    stdin_bodies: int = 64
    previews: int = 192
    """Requests and WebSockets of visitors; each takes one of the agent's 256 tunnels."""
    json_bytes: int = 2 << 20
    """Any JSON request body."""
    stdin_bytes: int = 64 << 20
    """One POST of stdin; a longer one goes in parts."""
    file_bytes: int = 1 << 40
    """One uploaded body."""
    url_bytes: int = 12 << 10


class Slots:
    """Counted slots by name; taking one over its limit raises `limit_reached` with the name."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._taken: dict[str, int] = {}

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        self.take(name)
        try:
            yield
        finally:
            self.give(name)

    def take(self, name: str) -> None:
        limit: int = getattr(self._limits, name)
        taken = self._taken.get(name, 0)
        if taken >= limit:
            raise LimitReached(
                f"cannot open another of the sandbox's {name}",
                f"{limit} are open, and a sandbox has at most so many at once",
                details={"limit": name, "value": limit},
            )
        self._taken[name] = taken + 1

    def give(self, name: str) -> None:
        self._taken[name] -= 1
