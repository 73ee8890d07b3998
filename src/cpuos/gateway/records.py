"""The record of one command: what is told of it, who started it, and its two recorded streams."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import string
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from cpuos.gateway.spool import SpoolLimits, StreamFile
from cpuos.gateway.tickets import Ticket
from cpuos.types.command import Command, CommandStart, CommandStatus

__all__ = [
    "STREAMS",
    "CommandRecord",
    "RecordedCommand",
    "StreamName",
    "command_begun",
    "new_command_id",
    "read_record",
    "remove_files",
    "shown_argv",
    "write_whole",
]

StreamName = Literal["stdout", "stderr"]
STREAMS: tuple[StreamName, StreamName] = ("stdout", "stderr")
MAX_SHOWN_ARGV = 8 << 10
_ID_LETTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True, kw_only=True)
class CommandRecord:
    """What lies in `ID.jsonl`, a line for each state. Neither environment nor stdin are in it."""

    command: Command
    ticket: Ticket
    intent: int
    """Journal entry of the start."""
    key: str | None = None
    """Idempotency key, with the digest of the body that it is bound to."""
    body_digest: str = ""
    timeout_s: float | None = None
    stdin_open: bool = False
    pid: int | None = None
    outputs_removed: bool = False

    def to_json(self) -> bytes:
        ticket = self.ticket
        rest = json.dumps(
            {
                "ticket": {
                    "id": ticket.id,
                    "workspace": ticket.workspace,
                    "sandbox": ticket.sandbox,
                    "generation": ticket.generation,
                    "actor": ticket.actor,
                    "task": ticket.task,
                },
                "intent": self.intent,
                "key": self.key,
                "body_digest": self.body_digest,
                "timeout_s": self.timeout_s,
                "stdin_open": self.stdin_open,
                "pid": self.pid,
                "outputs_removed": self.outputs_removed,
            }
        )
        return f'{{"command":{self.command.model_dump_json()},{rest[1:]}'.encode()

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> CommandRecord:
        """From what `to_json` wrote."""
        command = Command.model_validate(values["command"])
        ticket = Ticket(scope=frozenset(), issued_at=0, expires_at=0, **values["ticket"])
        return cls(**(values | {"command": command, "ticket": ticket}))


class RecordedCommand:
    """A record and its streams, and the news that either changed. Running or ended alike.

    Its files are `ID.jsonl`, `ID.stdout`, `ID.stderr`; each is made when there is something to write.
    """

    def __init__(self, record: CommandRecord, *, folder: Path, limits: SpoolLimits, fresh: bool = False) -> None:
        self.record = record
        self.folder = folder
        self.users = 0
        """Holders of open descriptors: the command's run, and its followers."""
        self.streams: dict[StreamName, StreamFile] = {
            name: StreamFile(f"{folder}/{self.id}.{name}", limits=limits, fresh=fresh) for name in STREAMS
        }
        self._descriptor: int | None = None
        self.followers: set[Any] = set()
        """Followers whose clients read now (`cpuos.gateway.follow.Follower`)."""
        self._waiters: list[asyncio.Future[None]] = []
        if self.ended:
            self._check_streams()

    def _check_streams(self) -> None:
        counts = {"stdout": self.record.command.stdout_bytes, "stderr": self.record.command.stderr_bytes}
        for name, stream in self.streams.items():
            # After a power cut a stream can be shorter than its record says: then it is not to be relied on.
            if self.record.outputs_removed or stream.total != counts[name]:
                stream.remove(total=counts[name])

    @property
    def id(self) -> str:
        return self.record.command.id

    @property
    def ended(self) -> bool:
        return self.record.command.status.ended

    @property
    def stored(self) -> int:
        return sum(stream.stored for stream in self.streams.values())

    def command(self) -> Command:
        """As it stands now."""
        return self.record.command.model_copy(update=self._counts())

    def _counts(self) -> dict[str, Any]:
        out, err = self.streams["stdout"], self.streams["stderr"]
        return {
            "stdout_bytes": out.total,
            "stderr_bytes": err.total,
            "stdout_dropped_bytes": out.dropped,
            "stderr_dropped_bytes": err.dropped,
        }

    def holds_back(self) -> bool:
        """A client that reads is so far behind that more output would cost it some."""
        return any(follower.holds_back() for follower in self.followers)

    def update(self, **changes: Any) -> None:
        """Change fields of the command; `save` makes it last."""
        command = self.record.command.model_copy(update={**self._counts(), **changes})
        self.record = replace(self.record, command=command)

    def save(self) -> None:
        """Make the record last: one more line, of which a reader takes the last whole one."""
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(f"{self.folder}/{self.id}.jsonl", flags, 0o600)
        line = self.record.to_json() + b"\n"
        if os.write(self._descriptor, line) < len(line):
            raise OSError(28, "No space left on device", f"{self.id}.jsonl")

    def remove_outputs(self) -> None:
        """Drop the recorded bytes of an ended command; the record stays and says so."""
        self.record = replace(self.record, outputs_removed=True)
        for stream in self.streams.values():
            stream.remove(total=stream.total)
        self.update()
        self.save()
        self._close()
        self.notify()

    def release(self) -> None:
        """One holder less; the last one closes the files."""
        self.users -= 1
        if self.users <= 0:
            self._close()

    def _close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def notify(self) -> None:
        """Wake all that wait for a change."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def change(self, limit_s: float, *, or_when: asyncio.Future[Any] | None = None) -> None:
        """Return at the next change, after `limit_s`, or when the other future is done."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.append(waiter)
        timer = loop.call_later(limit_s, _settle, waiter)
        wake = None
        if or_when is not None:
            wake = lambda _: _settle(waiter)  # noqa: E731
            or_when.add_done_callback(wake)
        try:
            await waiter
        finally:
            timer.cancel()
            if wake is not None:
                or_when.remove_done_callback(wake)
            with suppress(ValueError):
                self._waiters.remove(waiter)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def new_command_id() -> str:
    return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in secrets.token_bytes(16))


def command_begun(request: CommandStart, command_id: str, *, sandbox: str, generation: int) -> Command:
    return Command(
        id=command_id,
        sandbox=sandbox,
        generation=generation,
        argv=shown_argv(request),
        cwd=request.cwd,
        user=request.user,
        pty=request.pty is not None,
        status=CommandStatus.RUNNING,
        started_at=datetime.now(UTC),
    )


def shown_argv(request: CommandStart) -> list[str]:
    """The command line as it is recorded: what is over 8 KiB is cut and says so."""
    argv = request.argv if request.argv is not None else ["/bin/bash", "-c", request.command or ""]
    room = MAX_SHOWN_ARGV
    shown = []
    for count, word in enumerate(argv):
        if len(word) > room or (room <= 0 and count):
            shown.append(
                f"{word[: max(room, 0)]}… ({sum(map(len, argv[count:]))} characters in {len(argv) - count} words)"
            )
            break
        shown.append(word)
        room -= len(word) + 1
    return shown


def read_record(folder: Path, command_id: str) -> dict[str, Any] | None:
    """The values of a record as it was saved last; None when none was saved whole."""
    try:
        lines = (folder / f"{command_id}.jsonl").read_bytes().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with suppress(ValueError):
            if line:
                return json.loads(line)
    return None


def remove_files(folder: Path, command_id: str) -> None:
    """Everything of one command."""
    for suffix in ("jsonl", "stdout", "stderr", "stdout.ring", "stderr.ring"):
        with suppress(OSError):
            os.unlink(folder / f"{command_id}.{suffix}")


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file."""
    partial = f"{path}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(28, "No space left on device", partial)
    finally:
        os.close(descriptor)
    os.replace(partial, path)
