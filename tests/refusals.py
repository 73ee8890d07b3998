"""Results that tell what their command was refused: where the worker was asked in vain, the command runs again."""

from __future__ import annotations

from collections.abc import Callable

from cpuos import Result
from cpuos.testing.waiting import wait_until


def told_refusals(run: Callable[[], Result]) -> Result:
    """The first result whose refused connections are known: an end is held up for them for half a second only."""

    def look() -> Result | None:
        result = run()
        return result if result.refused_connections is not None else None

    return wait_until(look)
