"""The records on disk: lines of JSON in numbered segments, append-only and bounded.

The server reads them by number; asking for what follows N says that everything up to N is held, and older segments go.
If nobody asks, the oldest go as soon as there are too many, and what they held is told as lost. Beside the segments
lies `state`: what was open, and how much was written, when the newest segment was begun.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json

__all__ = ["RecordsJournal"]

MAX_PAGE = 5000
_KEPT_SEGMENTS = 2
_SKIP_AFTER_CRASH = 100_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RecordsJournal:
    """One process at a time. Fields that begin with an underscore stay on disk."""

    def __init__(
        self,
        folder: Path,
        *,
        state: Callable[[], dict[str, Any]],
        segment_bytes: int = 8 << 20,
        max_segments: int = 16,
    ) -> None:
        """`state` gives what to keep when a segment is begun."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._make_state = folder, state
        self._segment_bytes, self._max_segments = segment_bytes, max_segments
        self._segments = sorted(int(path.stem) for path in folder.glob("*.jsonl"))
        self._descriptor, self._size = -1, 0
        self._lines: list[tuple[str, bytes]] = []
        self._lost: Counter[str] = Counter()
        self._cursor = (0, 0, 0)
        self.last = 0
        self.instance = self._read_instance()
        """Whose numbers these are: another one after the journal was lost."""
        self.kept_state = self._read_state()
        """As it was saved, with `seq`, the last number before it."""
        self._open_last()

    def close(self) -> None:
        self.flush()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def next(self) -> int:
        """The number of what is appended next."""
        return self.last + len(self._lines) + 1

    def append(self, entry: dict[str, Any]) -> None:
        """Written by the next `flush`."""
        line = json.dumps({"seq": self.next, **entry}, separators=(",", ":")).encode() + b"\n"
        self._lines.append((str(entry["sandbox"]), line))

    def flush(self) -> None:
        """Write what was appended. What cannot be written, on a full disk, is lost and counted."""
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        data = b"".join(line for _, line in lines)
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                os.ftruncate(self._descriptor, self._size)
                raise OSError("no space left on the device")
        except OSError:
            self._lost.update(sandbox for sandbox, _ in lines)
            return
        self._size += written
        self.last += len(lines)
        if self._size >= self._segment_bytes:
            with suppress(OSError):
                self._begin_segment(self.last + 1)

    def keep_state(self) -> None:
        """Write the state down now: what it was before is not to be found again."""
        self.flush()
        with suppress(OSError):
            self._save_state()

    def take_lost(self) -> dict[str, int]:
        """By sandbox: entries that were lost since the last call."""
        lost, self._lost = dict(self._lost), Counter()
        return lost

    def page(self, after: int, *, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Entries that follow number `after`, oldest first, and what to ask for next."""
        limit = max(1, min(limit, MAX_PAGE))
        self._forget(after)
        entries: list[dict[str, Any]] = []
        for entry, segment, position in self._read(after):
            entries.append({name: value for name, value in entry.items() if not name.startswith("_")})
            if len(entries) == limit:
                self._cursor = (entry["seq"], segment, position)
                break
        return entries, max(entries[-1]["seq"] if entries else 0, after)

    def recent(self) -> Iterator[dict[str, Any]]:
        """All entries of the newest segments, from before the kept state on; with what stays on disk."""
        for first in self._segments[-_KEPT_SEGMENTS:]:
            for line in self._path(first).read_bytes().splitlines():
                if (entry := _parse(line)) is not None:
                    yield entry

    def _read(self, after: int) -> Iterator[tuple[dict[str, Any], int, int]]:
        for index, first in enumerate(list(self._segments)):
            following = self._segments[index + 1] if index + 1 < len(self._segments) else self.last + 1
            if following <= after + 1:
                continue
            position = self._cursor[2] if self._cursor[1] == first and self._cursor[0] <= after else 0
            with self._path(first).open("rb") as file:
                file.seek(position)
                for line in file:
                    position += len(line)
                    entry = _parse(line)
                    if entry is not None and entry["seq"] > after:
                        yield entry, first, position

    def _forget(self, held: int) -> None:
        while len(self._segments) > _KEPT_SEGMENTS and self._segments[1] <= held + 1:
            self._path(self._segments.pop(0)).unlink(missing_ok=True)

    def _give_up(self) -> None:
        """The oldest segment goes unread."""
        path = self._path(self._segments.pop(0))
        for line in path.read_bytes().splitlines():
            if (entry := _parse(line)) is not None:
                self._lost[entry["sandbox"]] += 1
        path.unlink(missing_ok=True)

    def _begin_segment(self, first: int) -> None:
        descriptor = os.open(self._path(first), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._size = descriptor, 0
        self._segments.append(first)
        self._save_state()
        while len(self._segments) > self._max_segments:
            self._give_up()

    def _save_state(self) -> None:
        state = {**self._make_state(), "seq": self.last, "boot": _boot_id()}
        path = self._folder / "state"
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").rename(path)

    def _read_state(self) -> dict[str, Any]:
        with suppress(FileNotFoundError, ValueError):
            state = from_json((self._folder / "state").read_bytes())
            if isinstance(state, dict) and isinstance(state.get("seq"), int):
                return state
        return {"seq": 0, "boot": _boot_id()}

    def _read_instance(self) -> str:
        path = self._folder / "instance"
        with suppress(FileNotFoundError):
            if name := path.read_text().strip():
                return name
        name = secrets.token_hex(8)
        path.write_text(name)
        return name

    def _open_last(self) -> None:
        if not self._segments:
            self._begin_segment(1)
            return
        path = self._path(self._segments[-1])
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        data = path.read_bytes()
        self._size = data.rfind(b"\n") + 1  # a torn line never was written
        os.ftruncate(self._descriptor, self._size)
        self.last = self._segments[-1] - 1 + data.count(b"\n")
        if self.kept_state.get("boot") != _boot_id():
            # What a power cut took may have been read: its numbers are not used again.
            self.last += _SKIP_AFTER_CRASH
            self._begin_segment(self.last + 1)

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:016d}.jsonl"


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for what a bad disk has made of one: it must not stop the others."""
    try:
        entry = from_json(line)
    except ValueError:
        return None
    is_entry = isinstance(entry, dict) and isinstance(entry.get("seq"), int) and isinstance(entry.get("sandbox"), str)
    return entry if is_entry else None
