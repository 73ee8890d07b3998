"""Verbs as lists of (undo, do). The undo is registered before its do and bears "nothing there", so that a do that
stopped half-way is undone too. Steps that do not need each other are done together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

__all__ = ["Checkpoint", "Step", "Together", "UndoFailed", "run_steps", "run_whole"]

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


@dataclass(frozen=True, kw_only=True)
class Together:
    """Steps done at the same time: all of them come to their end, also when one fails, and are undone then."""

    steps: Sequence[Step]


async def run_steps(verb: str, steps: Sequence[Step | Together], *, checkpoint: Checkpoint) -> None:
    """Do all steps in order. On a failure undo those begun, newest first, and raise the failure.

    Cancelling takes effect between steps, never inside one or its undo: both may have threads at work on the host. An
    undo that fails does not stop the others; then UndoFailed is raised from the failure.
    """
    failed: list[str] = []

    async def undo(step: Step) -> None:
        try:
            checkpoint(f"{verb}.{step.name}.undo")
            if step.undo is not None:
                await run_whole(step.undo())
        except Exception:
            log.exception("undo failed", verb=verb, step=step.name)
            failed.append(step.name)

    async def do(step: Step) -> None:
        checkpoint(f"{verb}.{step.name}.before")
        await step.do()
        checkpoint(f"{verb}.{step.name}.after")

    try:
        async with AsyncExitStack() as stack:
            for part in steps:
                members = part.steps if isinstance(part, Together) else [part]
                for step in members:
                    stack.push_async_callback(undo, step)
                await run_whole(_all_to_the_end([do(step) for step in members]))
            stack.pop_all()
    except BaseException as error:
        if failed:
            raise UndoFailed(failed) from error
        raise


async def _all_to_the_end(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(works) == 1:
        await works[0]
        return
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def run_whole(work: Awaitable[T]) -> T:
    """Await to the end even when the caller is cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise
