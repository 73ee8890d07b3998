"""How much of something was used within the last while, from a total that only rises. Pure."""

from __future__ import annotations

from collections import deque

__all__ = ["Window"]

_PARTS = 60


class Window:
    """Of one total of one sandbox. It keeps some sixty samples, however often it is told."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._samples: deque[tuple[float, float]] = deque()
        """Moment and total: at most the first one is older than the window, and they are a sixtieth of it apart."""
        self._last = (float("-inf"), float("-inf"))

    @property
    def is_whole(self) -> bool:
        """It knows of all of the window: that little was used is no mere want of knowledge."""
        return bool(self._samples) and self._last[0] - self._samples[0][0] >= self._length_s

    def add(self, at: float, total: float) -> float:
        """What was used within the window that ends now.

        Where nothing was told for longer than the window, it is the mean of that time: what is said to be used was
        used. A clock or total that went back is another's: it begins anew.
        """
        if at < self._last[0] or total < self._last[1]:
            self._samples.clear()
        self._last = (at, total)
        while len(self._samples) > 1 and self._samples[1][0] <= at - self._length_s:
            self._samples.popleft()
        if not self._samples or at - self._samples[-1][0] >= self._length_s / _PARTS:
            self._samples.append((at, total))
        began, before = self._samples[0]
        span, used = at - began, total - before
        return used if span <= self._length_s else used * self._length_s / span
