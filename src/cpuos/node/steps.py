"""Verbs as lists of (undo, do). The undo is registered before its do and bears "nothing there", so that a do that
stopped half-way is undone too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

__all__ = ["Checkpoint", "Step", "UndoFailed", "run_steps"]

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
    do: Callable[[], Awaitable[None]]
    undo: Callable[[], Awaitable[None]] | None = None


async def run_steps(verb: str, steps: Sequence[Step], *, checkpoint: Checkpoint) -> None:
    """Do all steps in order. On a failure undo those begun, newest first, and raise the failure.

    An undo that fails does not stop the others; then UndoFailed is raised from the failure.
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
                await step.do()
                checkpoint(f"{verb}.{step.name}.after")
            stack.pop_all()
    except BaseException as error:
        if failed:
            raise UndoFailed(failed) from error
        raise
