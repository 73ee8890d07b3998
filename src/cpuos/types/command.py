"""Command: one program run in a sandbox, its closed set of ends, and what is recorded of it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from cpuos.types.base import Answer, Request
from cpuos.types.limits import ReachedLimit
from cpuos.types.network import RefusedConnection

__all__ = ["COMMAND_ID_PATTERN", "Command", "CommandList", "CommandStart", "CommandStatus", "Pty"]

COMMAND_ID_PATTERN = r"^[a-z0-9]{16}$"
MAX_ARGS_BYTES = 1 << 20


class CommandStatus(StrEnum):
    RUNNING = "running"
    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    OOM_KILLED = "oom_killed"
    LIMITED = "limited"
    KILLED = "killed"
    SANDBOX_LOST = "sandbox_lost"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        return self is not CommandStatus.RUNNING


class Pty(Request):
    cols: int = Field(80, ge=1, le=1000)
    rows: int = Field(24, ge=1, le=1000)


class CommandStart(Request):
    """Exactly one of `argv` (run as it is) and `command` (a string for `/bin/bash -c`)."""

    argv: Annotated[list[str], Field(min_length=1, max_length=65536)] | None = None
    command: str | None = None
    cwd: str = "/workspace"
    env: dict[Annotated[str, StringConstraints(pattern=r"^[^=\x00]+$")], str] = Field(default_factory=dict)
    user: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_.-]{0,31}$")] = "user"
    timeout_s: float | None = Field(None, gt=0, le=30 * 86400)
    """None: until it ends or the sandbox does."""
    stdin: Literal["none", "open"] = "none"
    """none: the program reads end of file at once. open: bytes follow by POST …/stdin."""
    pty: Pty | None = None
    detach: bool = False
    """True: answer with the record as soon as it runs, instead of streaming frames."""

    @model_validator(mode="after")
    def _one_program(self) -> CommandStart:
        if (self.argv is None) == (self.command is None):
            raise ValueError("give exactly one of argv and command")
        texts = [*(self.argv or [self.command or ""]), self.cwd, *self.env.values(), *self.env]
        if any("\x00" in text for text in texts):
            raise ValueError("a zero byte cannot be passed to a program")
        if sum(len(text) for text in texts) > MAX_ARGS_BYTES:
            raise ValueError(f"argv and env are over {MAX_ARGS_BYTES} bytes together; pass data by a file or stdin")
        return self


class Command(Answer):
    id: str
    sandbox: str
    generation: int = 1
    argv: list[str]
    cwd: str = "/workspace"
    user: str = "user"
    pty: bool = False
    status: CommandStatus
    exit_code: int | None = None
    """Only with status exited. It is the guest's word."""
    signal: int | None = None
    limit: str | None = None
    reason: str = ""
    limit_reached: ReachedLimit | None = None
    """The limit that says most about its end, also where it ended by itself: full, refused, too long."""
    started_at: datetime
    ended_at: datetime | None = None
    duration_s: float | None = None
    stdout_bytes: int = 0
    """All that the program wrote, dropped bytes included."""
    stderr_bytes: int = 0
    stdout_dropped_bytes: int = 0
    """Bytes that the host's bounded record no longer holds (its middle; head and tail stay)."""
    stderr_dropped_bytes: int = 0
    output_path: str | None = None
    """Folder inside the sandbox with the full copies `stdout` and `stderr`; None while the output is small."""
    refused_connections: list[RefusedConnection] | None = None
    """What the sandbox was refused while the command ran; the first 50. None: not known, or not looked for, as with
    commands that exit with code 0 within 50 ms."""


class CommandList(Answer):
    commands: list[Command]
