"""What a VMM writes about itself, kept within bounds: the end of its log, and its last counters.

Both come by pipes whose names lie outside of the jail. A guest can make its VMM write much: what is older goes, and a
VMM whose pipe is full goes on without.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

__all__ = ["PIPES", "Reports", "make_pipes"]

PIPES = ("log", "metrics")
_KEPT = {"log": 16 << 10, "metrics": 64 << 10}
_PIECE = 64 << 10


def make_pipes(folder: Path, *, uid: int) -> None:
    """The ends that a VMM of this user writes to."""
    for name in PIPES:
        os.mkfifo(folder / name, 0o600)
        os.chown(folder / name, uid, uid)


class Reports:
    """Reads from when it is made, in the running loop, until `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError where the machine has no such pipes."""
        self._kept = dict.fromkeys(PIPES, b"")
        self._open: dict[str, int] = {}
        try:
            for name in PIPES:
                # For writing too: a pipe with nobody at its other end would count as ended, again and again.
                self._open[name] = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            self._close_all()
            raise
        for name, descriptor in self._open.items():
            asyncio.get_running_loop().add_reader(descriptor, self._read, name)

    def log_end(self) -> str:
        """The last lines, on one."""
        said = self._kept["log"].decode(errors="replace").strip()[-500:]
        return "".join(letter if letter.isprintable() else " " for letter in said)

    def seccomp_faults(self) -> int:
        """How often it was stopped by its filter, by its own count; 0 where it has not told."""
        lines = self._kept["metrics"].splitlines()
        try:
            return int(json.loads(lines[-1])["seccomp"]["num_faults"])
        except (IndexError, ValueError, KeyError, TypeError, RecursionError):
            return 0

    def catch_up(self) -> None:
        """Read what is there."""
        for name in self._open:
            self._read(name)

    def close(self) -> None:
        for descriptor in self._open.values():
            asyncio.get_running_loop().remove_reader(descriptor)
        self._close_all()

    def _read(self, name: str) -> None:
        try:
            piece = os.read(self._open[name], _PIECE)
        except BlockingIOError:
            return
        self._kept[name] = (self._kept[name] + piece)[-_KEPT[name] :]

    def _close_all(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
