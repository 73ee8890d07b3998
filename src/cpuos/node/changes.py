"""The feed of changes: what the server polls to hear of deaths within a second."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from cpuos.types.node import SandboxFacts

__all__ = ["ChangeFeed"]

MAX_ENDED = 4096
GOOD_NEWS_S = 0.25
"""Nobody waits for the word that a sandbox runs: of many creates one is told."""


class ChangeFeed:
    """The newest facts of each sandbox, in the order of their change.

    Numbers start at the microseconds of the daemon's start, so that they rise over restarts without a file; a reader
    with a number from before gets everything once.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._seq = self._floor = int(now() * 1e6)
        self._latest: OrderedDict[str, tuple[int, SandboxFacts]] = OrderedDict()
        self._changed = asyncio.Event()
        self._telling: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        """Let those who wait go: the daemon stops."""
        self._closed = True
        self._changed.set()

    def publish(self, facts: SandboxFacts) -> None:
        self._seq += 1
        self._latest[facts.id] = (self._seq, facts)
        self._latest.move_to_end(facts.id)
        self._forget_ended()
        if not facts.alive or facts.paused:
            self._tell()
        elif self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(GOOD_NEWS_S, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, seq: int, *, wait_s: float) -> tuple[int, list[SandboxFacts]]:
        """Changes with a higher number; waits up to `wait_s` for the first."""
        if not self._floor <= seq <= self._seq:
            return self._seq, [facts for _, facts in self._latest.values()]
        if wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while seq == self._seq and not self._closed:  # what is told late may be known already
                        await self._changed.wait()
        return self._seq, [facts for number, facts in self._latest.values() if number > seq]

    def _forget_ended(self) -> None:
        """A reader that slept for thousands of ends learns of the oldest by the full list instead."""
        if len(self._latest) <= 2 * MAX_ENDED:
            return
        ended = [sandbox_id for sandbox_id, (_, facts) in self._latest.items() if not facts.alive]
        for sandbox_id in ended[:-MAX_ENDED]:
            del self._latest[sandbox_id]
