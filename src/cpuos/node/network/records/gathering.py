"""Equal refusals within a second become one record with a count, and too many different ones do as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Gathered", "Gathering", "Refusal"]

WINDOW_S = 1.0
_DIFFERENT = 64


class Refusal(NamedTuple):
    kind: str
    name: str | None
    address: str | None
    port: int | None
    rule: str


@dataclass(kw_only=True, slots=True)
class Gathered:
    refusal: Refusal
    at: float
    """Of the first."""
    until: float
    """Of the last."""
    count: int = 0
    logged: int = 0
    """How many of them the router counted."""


class Gathering:
    """Of one sandbox."""

    def __init__(self) -> None:
        self._held: dict[Refusal, Gathered] = {}
        self._since = 0.0

    def add(self, refusal: Refusal, *, at: float, is_logged: bool) -> None:
        if not self._held:
            self._since = at
        if refusal not in self._held and len(self._held) >= _DIFFERENT:
            refusal = Refusal(refusal.kind, None, None, None, refusal.rule)
        held = self._held.setdefault(refusal, Gathered(refusal=refusal, at=at, until=at))
        held.until = max(held.until, at)
        held.count += 1
        held.logged += is_logged

    def take(self, now: float | None = None) -> list[Gathered]:
        """What is whole by now; without a time, everything."""
        if not self._held or (now is not None and 0 <= now - self._since < WINDOW_S):
            return []
        held, self._held = list(self._held.values()), {}
        return held
