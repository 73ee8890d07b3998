"""How much one sandbox may ask of the process that serves all: questions, and the time that they take here."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Bucket"]


class Bucket:
    """Filled at `per_s` up to `burst`. What is taken may be more than is in it: the next taker waits the longer."""

    __slots__ = ("_burst", "_clock", "_filled_at", "_level", "_per_s")

    def __init__(self, *, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._level, self._filled_at = burst, clock()

    def wait_s(self) -> float:
        """How long until there is something in it; 0 now."""
        self._fill()
        return 0.0 if self._level > 0 else (0.001 - self._level) / self._per_s

    def take(self, amount: float = 1.0) -> bool:
        """Whether there was something; without, nothing is taken."""
        self._fill()
        if self._level <= 0:
            return False
        self._level -= amount
        return True

    def spend(self, amount: float) -> None:
        """Take in any case: it has been used already."""
        self._level -= amount

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._burst, self._level + max(0.0, now - self._filled_at) * self._per_s)
        self._filled_at = now
