"""Work that outlives the call that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Tasks"]

T = TypeVar("T")


class Tasks:
    """Holds running tasks; a client that goes away cancels none of them. Shared work is found by subject and verb."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._shared: dict[tuple[str, str], asyncio.Task[Any]] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def share(self, subject: str, verb: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start the work, or join the same verb that runs on the same subject."""
        key = subject, verb
        running = self._shared.get(key)
        if running is not None:
            work.close()
            return running
        task = self.start(work)
        self._shared[key] = task
        task.add_done_callback(lambda _: self._shared.pop(key, None))
        return task

    def find(self, subject: str, verb: str) -> asyncio.Task[Any] | None:
        """The shared work of this verb on this subject, while it runs."""
        return self._shared.get((subject, verb))

    def busy(self, subject: str) -> bool:
        """Some shared work runs on the subject."""
        return any(key[0] == subject for key in self._shared)

    async def shared_ended(self) -> None:
        """Until no shared work runs."""
        while self._shared:
            await asyncio.wait(self._shared.values())

    async def close(self, *, grace_s: float) -> None:
        """Wait for what runs; then cancel the rest."""
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # taken up: who waits for the task gets it, and nobody may be waiting any more
