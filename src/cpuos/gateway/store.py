"""The commands of one sandbox on the gateway's disk: found again after a restart, bounded in number and bytes."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpuos.errors import NotFound
from cpuos.gateway.records import CommandRecord, RecordedCommand, read_record, remove_files, write_whole
from cpuos.gateway.spool import SpoolLimits
from cpuos.types.command import CommandStatus

__all__ = ["CommandStore"]

RECENT = 16
"""Ended commands kept in memory: the ones that are asked for."""


class CommandStore:
    """Folder `<sandbox>/`: `sandbox.json` and, in `commands/`, the files of `RecordedCommand`."""

    def __init__(self, folder: Path, *, limits: SpoolLimits) -> None:
        self.folder = folder
        self._limits = limits
        self._commands = folder / "commands"
        self._commands.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.running: dict[str, RecordedCommand] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Id to bytes on the disk, oldest first."""
        self._ended_bytes = 0
        self._recent: OrderedDict[str, RecordedCommand] = OrderedDict()
        self._keys: dict[str, tuple[str, str]] = {}
        """Idempotency key to command id and body digest."""
        self._load()

    def _load(self) -> None:
        """Without opening what has ended: there can be many."""
        sizes: dict[str, int] = {}
        for entry in os.scandir(self._commands):
            command_id = entry.name.partition(".")[0]
            recorded = entry.name.endswith((".stdout", ".stderr"))
            sizes[command_id] = sizes.get(command_id, 0) + (entry.stat().st_size if recorded else 0)
        found = []
        for command_id in sizes:
            values = read_record(self._commands, command_id)
            if values is None:
                remove_files(self._commands, command_id)  # died before its record was whole
            else:
                found.append((values["intent"], command_id, values))
        for _, command_id, values in sorted(found, key=lambda row: row[:2]):
            if values["key"] is not None:
                self._keys[values["key"]] = (command_id, values["body_digest"])
            if values["command"]["status"] == CommandStatus.RUNNING:
                self.running[command_id] = self._read(command_id)
            else:
                self._count(command_id, sizes[command_id])

    # facts of the sandbox

    def facts(self) -> dict[str, Any]:
        """What `save_facts` wrote last."""
        with suppress(FileNotFoundError, ValueError):
            return json.loads((self.folder / "sandbox.json").read_bytes())
        return {}

    def save_facts(self, facts: dict[str, Any]) -> None:
        write_whole(self.folder / "sandbox.json", json.dumps(facts).encode())

    def facts_written_at(self) -> float:
        """Of an ended sandbox: when it ended."""
        try:
            return (self.folder / "sandbox.json").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    # commands

    def add(self, record: CommandRecord) -> RecordedCommand:
        """A command that is about to start; nothing of it is on the disk until `save`."""
        recorded = RecordedCommand(record, folder=self._commands, limits=self._limits, fresh=True)
        recorded.users += 1
        self.running[recorded.id] = recorded
        if record.key is not None:
            self._keys[record.key] = (recorded.id, record.body_digest)
        return recorded

    def discard(self, recorded: RecordedCommand) -> None:
        """Remove every trace of a command that was not started."""
        self.running.pop(recorded.id, None)
        self.drop_key(recorded)
        recorded.release()
        remove_files(self._commands, recorded.id)

    def end(self, recorded: RecordedCommand) -> None:
        """The command's last record is saved: it counts as ended."""
        self.running.pop(recorded.id, None)
        self._count(recorded.id, recorded.stored)
        self._remember(recorded)
        recorded.release()
        while len(self._ended) > self._limits.records:
            self._remove(next(iter(self._ended)))

    def get(self, command_id: str) -> RecordedCommand:
        recorded = self.running.get(command_id) or self._recent.get(command_id)
        if recorded is None and command_id in self._ended:
            recorded = self._read(command_id)
            if recorded is not None:
                self._remember(recorded)
        if recorded is None:
            raise NotFound(
                f"cannot find command {command_id}",
                f"the sandbox has no such command, or has run over {self._limits.records} since",
                code="command_not_found",
                hint="cpuos ps SANDBOX",
            )
        return recorded

    def has(self, command_id: str) -> bool:
        return command_id in self.running or command_id in self._ended

    def by_key(self, key: str) -> tuple[RecordedCommand, str] | None:
        """The command that was started with this idempotency key, and the digest of the body then."""
        known = self._keys.get(key)
        return (self.get(known[0]), known[1]) if known else None

    def newest(self, limit: int) -> list[RecordedCommand]:
        """Running ones, then ended ones, the newest first."""
        ended = [self.get(command_id) for command_id in list(reversed(self._ended))[:limit]]
        return [*reversed(self.running.values()), *ended][:limit]

    # budget

    @property
    def stored(self) -> int:
        return self._ended_bytes + sum(recorded.stored for recorded in self.running.values())

    def make_room(self) -> bool:
        """Drop the oldest ended outputs until the sandbox is within its budget; False where that is not enough."""
        if self.stored <= self._limits.sandbox_bytes:
            return True
        for command_id in [command_id for command_id, size in self._ended.items() if size]:
            self.get(command_id).remove_outputs()
            self._count(command_id, 0)
            if self.stored <= self._limits.sandbox_bytes:
                return True
        return False

    def drop_outputs(self) -> None:
        """Drop all ended output; the records stay and say so."""
        for command_id in [command_id for command_id, size in self._ended.items() if size]:
            self.get(command_id).remove_outputs()
            self._count(command_id, 0)

    def _count(self, command_id: str, size: int) -> None:
        self._ended_bytes += size - self._ended.get(command_id, 0)
        self._ended[command_id] = size

    # inner

    def _read(self, command_id: str) -> RecordedCommand | None:
        values = read_record(self._commands, command_id)
        if values is None:
            return None
        return RecordedCommand(CommandRecord.from_values(values), folder=self._commands, limits=self._limits)

    def _remember(self, recorded: RecordedCommand) -> None:
        self._recent[recorded.id] = recorded
        self._recent.move_to_end(recorded.id)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def _remove(self, command_id: str) -> None:
        recorded = self.get(command_id)
        self._recent.pop(command_id, None)
        self._count(command_id, 0)
        del self._ended[command_id]
        self.drop_key(recorded)
        remove_files(self._commands, command_id)

    def drop_key(self, recorded: RecordedCommand) -> None:
        """A later start with its idempotency key is a new one."""
        key = recorded.record.key
        if key is not None and self._keys.get(key, ("", ""))[0] == recorded.id:
            del self._keys[key]
