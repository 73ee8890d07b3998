"""Descriptors that are kept for each sandbox lie where no call needs them to be."""

from __future__ import annotations

import fcntl
import os
import select

__all__ = ["SELECT_LIMIT", "is_readable", "move_up"]

SELECT_LIMIT = 1024
"""select(2) takes numbers below. libnftables waits by it, and the process is aborted when its socket has another."""


def move_up(descriptor: int) -> int:
    """The same under a number that is not below `SELECT_LIMIT`, where the process may have so many; else as it is."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, SELECT_LIMIT)
    except OSError:
        return descriptor
    os.close(descriptor)
    return moved


def is_readable(descriptor: int, *, limit_s: float) -> bool:
    """Whether something is there to be read, or its end, once it is or the time is up. Any number will do."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, 1e3 * limit_s)))
