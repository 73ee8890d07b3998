"""Calls in progress, by ticket: a revoked ticket ends what it opened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from cpuos.gateway.tickets import Revocations, Ticket

__all__ = ["OpenStreams"]


class OpenStreams:
    """Each call enters itself while it is served."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[None], Ticket] = {}

    @contextmanager
    def open(self, ticket: Ticket) -> Iterator[None]:
        task = asyncio.current_task()
        self._open[task] = ticket
        try:
            yield
        finally:
            self._open.pop(task, None)

    def end_revoked(self, revocations: Revocations) -> int:
        """Cancel the calls whose tickets are revoked by now; how many."""
        ended = [task for task, ticket in self._open.items() if revocations.covers(ticket)]
        for task in ended:
            task.cancel()
        return len(ended)

    async def end_all(self) -> None:
        """This process ends: cut every call; clients resume with the next process."""
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
