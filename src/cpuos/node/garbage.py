"""What nothing needs goes in three steps, each safe to be cut: it is marked, and when it was marked without a break for
long enough it is moved out of its place, and only there taken apart. What is needed again loses its mark.

    garbage.json          path below the folder, and since when nothing needs it
    .garbage-<random>     moved away; whatever bears such a name may go at any time
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from pathlib import Path

import structlog

from cpuos.node.steps import Checkpoint

__all__ = ["GRACE", "Garbage"]

log = structlog.get_logger("cpuos.node")

GRACE = timedelta(hours=1)
_MOVED = ".garbage-"


class Garbage:
    """Of one folder (the node's state). All of it blocks; `move` only for the time of a rename."""

    def __init__(self, folder: Path, *, clock: Callable[[], datetime], checkpoint: Checkpoint) -> None:
        self._folder = folder
        self._clock = clock
        self._checkpoint = checkpoint

    def mark(self, unneeded: Collection[Path], *, grace: timedelta = GRACE) -> list[Path]:
        """These are needed by nothing now, and whatever else bears a mark is; those that have borne it for long
        enough."""
        now = self._clock()
        before = self._read()
        marks = {name: before.get(name, now) for name in (str(path.relative_to(self._folder)) for path in unneeded)}
        if marks != before:
            self._checkpoint("garbage.mark.before")
            self._write(marks)
            self._checkpoint("garbage.mark.after")
        return [self._folder / name for name, since in marks.items() if now - since >= grace]

    def move(self, path: Path) -> None:
        """Out of its place, whole: whoever looks for it from now on does not find a half of it."""
        self._checkpoint("garbage.move.before")
        try:
            path.rename(self._folder / f"{_MOVED}{secrets.token_hex(8)}")
        except FileNotFoundError:
            return
        self._checkpoint("garbage.move.after")
        log.info("garbage", path=str(path.relative_to(self._folder)))

    def empty(self) -> None:
        """Take apart what was moved away, also by a forerunner."""
        for name in os.listdir(self._folder):
            if name.startswith(_MOVED):
                self._checkpoint("garbage.empty.before")
                _remove(self._folder / name)
                self._checkpoint("garbage.empty.after")

    def _read(self) -> dict[str, datetime]:
        try:
            told = json.loads((self._folder / "garbage.json").read_bytes())
            return {str(name): datetime.fromisoformat(since) for name, since in told.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError):
            log.warning("marks of garbage unreadable: all begin anew")
            return {}

    def _write(self, marks: dict[str, datetime]) -> None:
        draft = self._folder / ".garbage.json"
        draft.write_text(json.dumps({name: since.isoformat() for name, since in marks.items()}))
        draft.rename(self._folder / "garbage.json")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
