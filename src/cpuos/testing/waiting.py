"""Waiting for what others bring about, with room for a machine that stands still for seconds.

A test waits for what it needs, never for a time in which it should have come; the limit is only for what never comes.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Callable
from typing import Any

__all__ = ["COMES_S", "until", "wait_until"]

COMES_S = 30.0
"""The limit for what always comes."""


async def until(condition: Callable[[], Any], *, within_s: float = COMES_S) -> Any:
    """What the condition answers once that is true; it may be a coroutine function."""
    async with asyncio.timeout(within_s):
        for pause_s in itertools.chain([0.001, 0.002, 0.005], itertools.repeat(0.01)):
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(pause_s)


def wait_until(condition: Callable[[], Any], *, within_s: float = COMES_S) -> Any:
    """`until` for a test without a loop."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it did not come within {within_s:g} s"
        time.sleep(0.01)
    return found
