"""A host process for good: its number with its start time, so that a number used again is never taken for it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cpuos.runtimes.base import Process
from cpuos.runtimes.descriptors import move_up

__all__ = ["find_process", "open_process", "unnamed_bytes"]


def find_process(pid: int) -> Process | None:
    """The process now behind this number, unless it is dead (a zombie counts as dead)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in brackets may hold spaces and brackets: fields count from the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else Process(pid=pid, start_time=int(fields[19]))


def open_process(process: Process) -> int | None:
    """A descriptor of exactly this process: the number is checked again once the descriptor holds it.

    None: it has ended. Any other trouble is an OSError: it says nothing of the process.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if find_process(process.pid) == process:
        return move_up(pidfd)
    os.close(pidfd)
    return None


def unnamed_bytes(pid: int, *, on: Path) -> int:
    """What the files without a name that only this process holds take of the volume of `on`; 0 once it is gone."""
    found = {}
    try:
        volume, entries = on.stat().st_dev, list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
    for entry in entries:
        try:
            facts = os.stat(entry.path)
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 and facts.st_dev == volume:
            found[facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())
