"""Snapshot: what one sandbox was at one moment, to make others of."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cpuos.types.base import Answer, Request
from cpuos.types.network import NetworkPolicy
from cpuos.types.sandbox import Label, LabelKey, Name, SandboxCreated

__all__ = [
    "MAX_FORKS",
    "Fork",
    "Forked",
    "Snapshot",
    "SnapshotCreate",
    "SnapshotList",
    "SnapshotState",
]

MAX_FORKS = 64


class SnapshotState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    """It was not made; nothing of it is kept but this record, for a day."""
    DELETING = "deleting"


class SnapshotCreate(Request):
    name: Name | None = None
    memory: bool = True
    """With its processes; else its files alone."""
    labels: dict[LabelKey, Label] | None = Field(None, max_length=64)
    """Those of the sandbox when none are given."""


class Snapshot(Answer):
    id: str
    name: str | None = None
    workspace: str
    state: SnapshotState
    reason: str = ""
    """Why it failed, or why it was made without being asked for."""
    sandbox: str
    """Id of the sandbox that it was made of."""
    memory: bool
    """Sandboxes made of it go on with its processes; else with its files."""
    size_bytes: int = 0
    """What it takes on its node; blocks that it shares with others count in each."""
    template: str
    template_digest: str = ""
    runtime: str
    node: str
    cpu: int
    memory_mib: int
    disk_mib: int
    max_processes: int
    labels: dict[str, str] = Field(default_factory=dict)
    network: NetworkPolicy = Field(default_factory=NetworkPolicy)
    created_at: datetime
    created_by: str


class SnapshotList(Answer):
    snapshots: list[Snapshot]
    """Newest first."""


class Fork(Request):
    count: Annotated[int, Field(ge=1, le=MAX_FORKS)] = 1
    """So many sandboxes, all or none."""
    timeout_s: float | None = Field(None, gt=0, le=30 * 86400)
    """Session length of each; that of the sandbox, or 15 minutes, when not given."""
    labels: dict[LabelKey, Label] | None = Field(None, max_length=64)
    """Instead of those of the sandbox or snapshot."""


class Forked(Answer):
    sandboxes: list[SandboxCreated]
