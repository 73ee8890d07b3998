"""A create at work in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from cpuos.errors import SandboxGone

__all__ = ["Creation", "undoing"]


class Creation:
    """Others may end its waiting, and wait for its end."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._abandoned: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def abandon(self, reason: str) -> None:
        """Nobody needs to wait for its agent any more."""
        if not self._abandoned.done():
            self._abandoned.set_result(reason)

    async def unless_abandoned(self, work: Any, *, what: str) -> Any:
        """The result of `work`, or sandbox_lost as soon as the create is abandoned."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._abandoned}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            if task.cancel():
                await asyncio.gather(task, return_exceptions=True)
        raise SandboxGone(f"cannot {what}", self._abandoned.result(), hint="cpuos create")


@asynccontextmanager
async def undoing() -> AsyncIterator[AsyncExitStack]:
    """What is registered there is undone when the block raises.

    But not when it is cancelled: then this process ends, and the next one finishes or fails what was begun.
    """
    async with AsyncExitStack() as undo:
        try:
            yield undo
        except asyncio.CancelledError:
            undo.pop_all()
            raise
        undo.pop_all()
