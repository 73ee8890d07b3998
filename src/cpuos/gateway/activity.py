"""What is open in a sandbox, since when nothing is, and which suspended ones were called."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Activity", "Wakes"]


class Activity:
    """Of one sandbox: calls, terminals, watches, transfers, previews and commands, as long as each lasts."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._open = 0
        self._brief = 0
        self._quiet: list[asyncio.Future[None]] = []
        self._touched = clock()

    @contextmanager
    def hold(self, *, brief: bool = False) -> Iterator[None]:
        """`brief`: it mostly ends by itself, and a pause waits a moment for that."""
        self.begin()
        self._brief += brief
        try:
            yield
        finally:
            self._brief -= brief
            self.end()
            if not self._brief:
                for waiter in self._quiet:
                    if not waiter.done():
                        waiter.set_result(None)

    def begin(self) -> None:
        self._open += 1

    def end(self) -> None:
        self._open -= 1
        self.touch()

    def touch(self) -> None:
        """Nobody was idle until now."""
        self._touched = self._clock()

    @property
    def busy(self) -> bool:
        return self._open > 0

    @property
    def idle_since(self) -> float | None:
        """Unix seconds; None while it is busy."""
        return None if self._open else self._touched

    async def calm(self, limit_s: float) -> None:
        """Wait for the end of what is brief, for so long."""
        if not self._brief:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._quiet.append(waiter)
        try:
            async with asyncio.timeout(limit_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._quiet.remove(waiter)


class Wakes:
    """The suspended sandboxes that were called and whose callers wait, each by its last call."""

    def __init__(self) -> None:
        self.source = secrets.token_hex(8)
        self._last = time.time_ns() // 1000
        """Above all numbers of an earlier process, so that who asks with one of those misses nothing."""
        self._called: dict[str, int] = {}
        self._news = asyncio.Event()

    def call(self, sandbox_id: str) -> None:
        self._last += 1
        self._called.pop(sandbox_id, None)
        self._called[sandbox_id] = self._last
        self._news.set()
        self._news = asyncio.Event()

    def forget(self, sandbox_id: str) -> None:
        """It goes on, has ended, or nobody waits for it any more."""
        self._called.pop(sandbox_id, None)

    async def after(self, seq: int, *, wait_s: float) -> tuple[list[tuple[int, str]], int]:
        """The calls behind this number, in their order, and the number to ask with next. A number that this process
        has not reached yet is another's: it counts as 0."""
        seq = seq if seq <= self._last else 0
        if not (found := self._since(seq)):
            try:
                async with asyncio.timeout(wait_s):
                    while not (found := self._since(seq)):
                        await self._news.wait()
            except TimeoutError:
                pass
        return found, self._last

    def _since(self, seq: int) -> list[tuple[int, str]]:
        return [(number, sandbox_id) for sandbox_id, number in self._called.items() if number > seq]
