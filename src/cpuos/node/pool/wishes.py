"""How many ready sandboxes of which shape are wanted: what was asked for of late says what will be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cpuos.node.pool.shape import Shape

__all__ = ["HALF_LIFE_S", "REMEMBERED_S", "Wishes", "share_out"]

HALF_LIFE_S = 120.0
"""A burst of creates is expected again for some minutes, by half as much after each of these."""
REMEMBERED_S = 1800.0
"""So long after the last create of a shape one of it is kept ready."""


class Wishes:
    """Counts of creates by shape, which fade."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[Shape, tuple[float, float]] = {}
        """Count, and when it was that; the shape asked for last is the last."""

    def note(self, shape: Shape) -> None:
        """A create asked for one."""
        now = self._clock()
        count, at = self._counts.pop(shape, (0.0, now))
        self._counts[shape] = (_faded(count, now - at) + 1.0, now)

    def wanted(self) -> dict[Shape, int]:
        """The shape asked for last comes first."""
        now = self._clock()
        for shape, (_, at) in list(self._counts.items()):
            if now - at > REMEMBERED_S:
                del self._counts[shape]
        faded = {shape: _faded(count, now - at) for shape, (count, at) in reversed(self._counts.items())}
        return {shape: max(1, round(count)) for shape, count in faded.items()}


def share_out(wanted: Mapping[Shape, int], *, room: int) -> dict[Shape, int]:
    """So many of each that all together are at most `room`: in turns, so that a large wish leaves something to others;
    in a turn the first comes first."""
    shares = dict.fromkeys(wanted, 0)
    while room > 0 and (open_ := [shape for shape, count in wanted.items() if shares[shape] < count]):
        for shape in open_[:room]:
            shares[shape] += 1
        room -= len(open_[:room])
    return shares


def _faded(count: float, age_s: float) -> float:
    return count * 0.5 ** (max(0.0, age_s) / HALF_LIFE_S)
