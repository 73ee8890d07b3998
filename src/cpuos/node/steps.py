"""Verbs as lists of (undo, do). The undo is registered before its do and bears "nothing there", so that a do that
stopped half-way is undone too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

__all__ = ["Checkpoint", "Step", "UndoFailed", "run_steps", "run_whole"]

T = TypeVar("T")
log = structlog.get_logger("cpuos.node")

Checkpoint = Callable[[str], None]
"""Called with "VERB.STEP.before", ".after" and ".undo"; fault injection raises from it."""


class UndoFailed(Exception):
    """A verb failed and not all of it could be undone: its record stays, and the undo is tried again."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__(f"cannot undo: {', '.join(steps)}")
        self.steps = steps


@dataclass(frozen=True, kw_only=True)
class Step:
    name: str
    do: Callable[[], Coroutine[Any, Any, None]]
    undo: Callable[[], Awaitable[None]] | None = None


async def run_steps(verb: str, steps: Sequence[Step], *, checkpoint: Checkpoint) -> None:
    """Do all steps in order. On a failure undo those begun, newest first, and raise the failure.

    Cancelling takes effect between steps, never inside one: a step may have threads at work on the host. An undo that
    fails does not stop the others; then UndoFailed is raised from the failure.
    """
    failed: list[str] = []

    async def undo(step: Step) -> None:
        try:
            checkpoint(f"{verb}.{step.name}.undo")
            if step.undo is not None:
                await step.undo()
        except Exception:
            log.exception("undo failed", verb=verb, step=step.name)
            failed.append(step.name)

    try:
        async with AsyncExitStack() as stack:
            for step in steps:
                stack.push_async_callback(undo, step)
                checkpoint(f"{verb}.{step.name}.before")
                await run_whole(step.do())
                checkpoint(f"{verb}.{step.name}.after")
            stack.pop_all()
    except BaseException as error:
        if failed:
            raise UndoFailed(failed) from error
        raise


async def run_whole(work: Coroutine[Any, Any, T]) -> T:
    """Await to the end even when the caller is cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise
