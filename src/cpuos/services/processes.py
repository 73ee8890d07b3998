"""Processes named by pid and start time, and signalled by pidfd: a pid that was given to another is never hit."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "find_process", "kill_process", "open_process", "wait_for_end"]


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process for good: `started` is field 22 of /proc/PID/stat."""

    pid: int
    started: int


def find_process(pid: int) -> Process | None:
    """The process that has this pid now; None when it is gone or a zombie."""
    try:
        # The second field is the name, in parentheses, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else Process(pid=pid, started=int(fields[19]))


def open_process(process: Process) -> int | None:
    """A pidfd of exactly this process; None when it has ended. The caller closes it."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if find_process(process.pid) == process:
        return descriptor
    os.close(descriptor)
    return None


def wait_for_end(descriptor: int, timeout_s: float) -> bool:
    """Whether the process of this pidfd ended in time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def kill_process(process: Process, *, grace_s: float) -> None:
    """SIGTERM, then SIGKILL after `grace_s`; returns when it has ended."""
    descriptor = open_process(process)
    if descriptor is None:
        return
    try:
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                return
            if wait_for_end(descriptor, wait_s):
                return
    finally:
        os.close(descriptor)
