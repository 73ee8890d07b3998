"""The time, as a parameter."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

__all__ = ["Clock", "utc_now"]

Clock = Callable[[], datetime]
"""Says the time now, in UTC, time zone set."""


def utc_now() -> datetime:
    return datetime.now(UTC)
