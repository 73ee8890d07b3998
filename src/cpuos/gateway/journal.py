"""The gateway's own record of what it was asked to do: an intent before each action, an outcome after it.

Lines of JSON in numbered segments. An entry is one write(2), so it survives the death of this process; fdatasync
follows in groups. An entry that cannot be written raises, and the caller does not act. The server reads the entries
into the audit table and, by asking for what follows, says what it holds: older segments are then removed.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cpuos.errors import CpuosError, Unavailable
from cpuos.gateway.tickets import Ticket

__all__ = ["Journal", "JournalPage"]

SEGMENT_BYTES = 8 << 20
SYNC_EVERY_S = 0.2
MAX_PAGE = 5000
KEPT_SEGMENTS = 2


@dataclass(frozen=True, kw_only=True)
class JournalPage:
    lines: list[bytes]
    """JSON, as it was written."""
    next: int
    """Ask for what follows this one."""


class Journal:
    """Append and page. One process at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._segments = sorted(int(path.stem) for path in folder.glob("*.jsonl"))
        self._descriptor = -1
        self._size = 0
        self._dirty = False
        self._sync: asyncio.Task[None] | None = None
        self._cursor = (0, 0, 0)
        """Where the last page ended: entry, segment, position. Pages follow each other."""
        self.last = 0
        self.instance = self._read_instance()
        """Whose numbers these are: another one after the journal was lost."""
        self._open_last()

    def _read_instance(self) -> str:
        path = self._folder / "instance"
        with suppress(FileNotFoundError):
            if name := path.read_text().strip():
                return name
        name = secrets.token_hex(8)
        path.write_text(name)
        return name

    def _open_last(self) -> None:
        first = self._segments[-1] if self._segments else 1
        if not self._segments:
            self._segments.append(first)
        path = self._path(first)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1  # a line torn by a power cut never was written
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)
        self._size = whole
        self.last = first - 1 + data.count(b"\n", 0, whole)

    def close(self) -> None:
        if self._sync is not None:
            self._sync.cancel()
        if self._descriptor >= 0:
            os.fdatasync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    # writing

    def intent(self, ticket: Ticket, action: str, *, target: str, detail: dict[str, Any]) -> int:
        """Record what is about to be done for the ticket's holder; the entry's number, for the outcome."""
        return self._append(
            {
                "sandbox": ticket.sandbox,
                "workspace": ticket.workspace,
                "actor": ticket.actor,
                "task": ticket.task,
                "ticket": ticket.id,
                "action": action,
                "phase": "intent",
                "target": target,
                "result": None,
                "detail": detail,
            }
        )

    def outcome(
        self, intent: int, ticket: Ticket, action: str, *, target: str, result: str, detail: dict[str, Any]
    ) -> int:
        """Record how it went: `result` is ok, error or unknown."""
        return self._append(
            {
                "sandbox": ticket.sandbox,
                "workspace": ticket.workspace,
                "actor": ticket.actor,
                "task": ticket.task,
                "ticket": ticket.id,
                "action": action,
                "phase": "outcome",
                "intent": intent,
                "target": target,
                "result": result,
                "detail": detail,
            }
        )

    def note(self, sandbox: str, action: str, *, target: str, detail: dict[str, Any]) -> int:
        """Record what happened by itself: nobody asked for it."""
        told = {"sandbox": sandbox, "actor": "system", "action": action, "phase": "outcome", "intent": None}
        return self._append(told | {"target": target, "result": "ok", "detail": detail})

    def _append(self, entry: dict[str, Any]) -> int:
        number = self.last + 1
        line = json.dumps({"seq": number, "at": datetime.now(UTC).isoformat(), **entry}).encode() + b"\n"
        if self._size >= SEGMENT_BYTES:
            self._next_segment(number)
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise _cannot_write(error) from error
        if written < len(line):
            os.ftruncate(self._descriptor, self._size)
            raise _cannot_write(OSError("no space left on the device"))
        self._size += written
        self.last = number
        self._sync_soon()
        return number

    def _next_segment(self, first: int) -> None:
        try:
            descriptor = os.open(self._path(first), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_write(error) from error
        os.fdatasync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._segments.append(first)
        self._size = 0

    def _sync_soon(self) -> None:
        self._dirty = True
        if self._sync is None or self._sync.done():
            with suppress(RuntimeError):  # no loop: a caller outside the service
                self._sync = asyncio.get_running_loop().create_task(self._sync_later())

    async def _sync_later(self) -> None:
        while self._dirty:
            await asyncio.sleep(SYNC_EVERY_S)
            self._dirty = False
            descriptor = os.dup(self._descriptor)
            try:
                await asyncio.get_running_loop().run_in_executor(None, os.fdatasync, descriptor)
            finally:
                os.close(descriptor)

    # reading

    def page(self, after: int, *, limit: int) -> JournalPage:
        """Entries that follow number `after`, oldest first. Segments that only hold entries up to `after` may go."""
        limit = max(1, min(limit, MAX_PAGE))
        self._forget(after)
        lines: list[bytes] = []
        last = after
        if after < self.last:
            for number, line, segment, position in self._lines(after):
                lines.append(line)
                last = number
                self._cursor = (number, segment, position)
                if len(lines) == limit:
                    break
        return JournalPage(lines=lines, next=max(last, after))

    def settle_interrupted(self, *, living: set[int]) -> set[int]:
        """At the beginning: what an earlier process left half-way gets the outcome unknown, but for living intents.

        Gives those of `living` that have their outcome already.
        """
        waiting: dict[int, dict[str, Any]] = {}
        settled = set()
        for number, line, _, _ in self._lines(0):
            entry = json.loads(line)
            if entry["phase"] == "intent":
                waiting[number] = entry
            else:
                waiting.pop(entry["intent"], None)
                settled.add(entry["intent"])
        for number, entry in waiting.items():
            if number not in living:
                kept = ("sandbox", "workspace", "actor", "task", "ticket", "action", "target")
                ended = {"phase": "outcome", "intent": number, "result": "unknown"}
                detail = {"reason": "the gateway restarted before it ended"}
                self._append({**{name: entry[name] for name in kept}, **ended, "detail": detail})
        return settled & living

    def _lines(self, after: int) -> Iterator[tuple[int, bytes, int, int]]:
        """Number, line, segment and the position behind it."""
        for index, first in enumerate(self._segments):
            following = self._segments[index + 1] if index + 1 < len(self._segments) else self.last + 1
            if following <= after + 1:
                continue
            number, position = first, 0
            if self._cursor[1] == first and self._cursor[0] <= after:
                number, position = self._cursor[0] + 1, self._cursor[2]
            with self._path(first).open("rb") as file:
                file.seek(position)
                for line in file:
                    position += len(line)
                    if number > after:
                        yield number, line, first, position
                    number += 1

    def _forget(self, held: int) -> None:
        while len(self._segments) > KEPT_SEGMENTS and self._segments[1] <= held + 1:
            self._path(self._segments.pop(0)).unlink(missing_ok=True)

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:016d}.jsonl"


def _cannot_write(error: OSError) -> CpuosError:
    return Unavailable(
        "cannot record the action, so it was not done",
        f"the gateway's journal cannot be written: {error.strerror or error}",
        code="gateway_unavailable",
        hint="cpuos doctor",
    )
