"""What names of one sandbox stand for: addresses that it was told, and until when the rules may keep them open."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence

__all__ = ["LearnedAddresses"]

_SHORTEST_S = 30
"""An answer with TTL 0 is still used for a connection or two."""
_GRACE_S = 30
"""A guest connects a moment after its own copy of the answer has ended."""


class LearnedAddresses:
    """Bounded: a zone with endless addresses would fill the rules of its sandbox."""

    def __init__(self, *, clock: Callable[[], float], most: int) -> None:
        self._clock, self._most = clock, most
        self._until: dict[tuple[str, ipaddress.IPv4Address], float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def missing(
        self, name: str, addresses: Sequence[ipaddress.IPv4Address], *, ttl_s: int
    ) -> list[ipaddress.IPv4Address]:
        """Those that are not known for as long as an answer of this TTL is used."""
        needed = self._clock() + max(ttl_s, _SHORTEST_S)
        return [address for address in addresses if self._until.get((name, address), 0.0) < needed]

    def opening_s(self, ttl_s: int) -> int:
        """How long a new address is to stay open."""
        return max(ttl_s, _SHORTEST_S) + _GRACE_S

    def has_room(self, count: int) -> bool:
        if len(self._until) + count > self._most:
            now = self._clock()
            self._until = {key: until for key, until in self._until.items() if until > now}
        return len(self._until) + count <= self._most

    def add(self, name: str, addresses: Sequence[ipaddress.IPv4Address], *, ttl_s: int) -> None:
        """The oldest make room when there is none."""
        until = self._clock() + self.opening_s(ttl_s)
        for address in addresses:
            self._until.pop((name, address), None)
            self._until[name, address] = until
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def restore(self, name: str, address: ipaddress.IPv4Address, *, seconds_left: int) -> None:
        """As it was known to an earlier one."""
        self._until[name, address] = self._clock() + seconds_left
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def all(self) -> Iterator[tuple[str, ipaddress.IPv4Address, int]]:
        """(name, address, seconds left) of all that are known; a connection may be older than what it was opened by."""
        now = self._clock()
        for (name, address), until in self._until.items():
            yield name, address, max(0, int(until - now))
