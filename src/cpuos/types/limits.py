"""Limits of a sandbox, and how it is told that one was reached."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from cpuos.types.base import Answer

__all__ = ["FullPlace", "LimitFacts", "LimitSource", "ReachedLimit", "SandboxLimit"]


class SandboxLimit(StrEnum):
    MEMORY = "memory"
    DISK = "disk"
    INODES = "inodes"
    TMP = "tmp"
    """Files in /tmp and in /dev/shm, which are kept in memory."""
    PROCESSES = "processes"
    """Threads count too."""
    OPEN_FILES = "open_files"
    """Of one process."""
    OUTPUT = "output"
    """What is recorded of one output stream."""
    TIMEOUT = "timeout"
    """Of one command."""
    SESSION = "session"


class LimitSource(StrEnum):
    """Who says that a limit was reached."""

    HOST = "host"
    """Measured or set from outside of the sandbox."""
    GUEST = "guest"
    """Counted by the kernel of a microVM, which is the guest's own: who is root in it can have it say anything."""
    OUTPUT = "output"
    """The program's own words: what it wrote is what a program writes that meets the limit."""


class ReachedLimit(Answer):
    """A limit that a command met. What to do about it is in `reason`."""

    limit: SandboxLimit
    value: float | None = None
    """The limit itself: bytes, a count, or seconds."""
    path: str | None = None
    """Of disk and inodes: the file system that was full."""
    seen_by: LimitSource = LimitSource.HOST
    reason: str = ""


class FullPlace(Answer):
    """One limit of a sandbox that is used up now."""

    limit: SandboxLimit
    value: int
    path: str | None = None
    seen_by: LimitSource = LimitSource.HOST


class LimitFacts(Answer):
    """What a node says of a sandbox's limits at one moment."""

    memory_bytes: int
    disk_bytes: int
    tmp_bytes: int = 0
    """Of /tmp, and again of /dev/shm; 0 where the runtime has no such limit."""
    processes: int
    guest_knows: bool = False
    """What is used up of disks and processes only the guest's own kernel can say."""
    full: list[FullPlace] = Field(default_factory=list)
