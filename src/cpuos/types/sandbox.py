"""Sandbox: the record in the control plane."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator

from cpuos.types.alarms import MAX_ALARMS, ActiveAlarm, AlarmRule
from cpuos.types.base import Answer, Request
from cpuos.types.network import NetworkPolicy
from cpuos.types.pack import MAX_PACKS, AttachedPack, PackName, PackPath

__all__ = [
    "HOST_RESTARTED",
    "LIVE_STATES",
    "SANDBOX_ID_PATTERN",
    "Access",
    "Isolation",
    "OnEnd",
    "Recreated",
    "Sandbox",
    "SandboxCreate",
    "SandboxCreated",
    "SandboxList",
    "SandboxState",
    "SandboxUpdate",
    "StartedFrom",
]

# Ids stand in host names after "{port}-", so lower case and digits only, under 63 characters with any port.
SANDBOX_ID_PATTERN = r"^[a-z0-9]{20}$"
# The reason of a loss after which only what was synced is surely there.
HOST_RESTARTED = "the host restarted"
# Names follow the host-name rule (RFC 1123): the guest's hostname is the sandbox's name.
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Label = Annotated[str, StringConstraints(max_length=256)]
LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]


class SandboxState(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"


LIVE_STATES = frozenset(SandboxState) - {SandboxState.STOPPED, SandboxState.FAILED, SandboxState.LOST}


class Isolation(StrEnum):
    """Strongest first; `none` is only the fake runtime of tests."""

    MICROVM = "microvm"
    GVISOR = "gvisor"
    EMULATED = "emulated"
    NONE = "none"


class StartedFrom(StrEnum):
    """How a sandbox came to be, the fastest first."""

    POOL = "pool"
    """It was ready: started before it was asked for."""
    RESTORE = "restore"
    """Its processes were taken up from what was saved."""
    COLD = "cold"
    """Its processes began anew."""


class OnEnd(StrEnum):
    """What becomes of a sandbox whose time ended, or that was idle for long."""

    KILL = "kill"
    PAUSE = "pause"


class Recreated(Answer):
    """What a sandbox that was lost began with when it was made anew under its id. Its programs did not come back."""

    at: datetime
    """When it ran again."""
    lost_at: datetime
    """When it was found to be lost."""
    lost_reason: str
    workspace: Literal["all", "synced"]
    """Of /workspace: all that was written until its process ended; `synced` where the host ended too, or a kernel of
    its own: at least all that was synced before."""
    root: Literal["saved", "template"]
    """All else below /: as it was last saved apart, or as its template has it."""
    root_at: datetime | None = None
    """When that was saved."""
    root_age_s: float | None = None
    """How long before the loss that was, at most: changes of that time did not come back."""


class SandboxCreate(Request):
    template: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = "python"
    name: Name | None = None
    runtime: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = "auto"
    min_isolation: Isolation | None = None
    """Refuse less than this."""
    allow_emulated: bool = False
    """Take a microVM that is only emulated, where the host has no better: for development."""
    cpu: int = Field(2, ge=1, le=64)
    memory_mib: int = Field(2048, ge=128, le=1 << 20)
    disk_mib: int = Field(8192, ge=64, le=1 << 22)
    max_processes: int = Field(None, validate_default=True, ge=16, le=32768)
    """512, or what the memory bears: one process for each 2 MiB."""
    timeout_s: float = Field(900, gt=0, le=30 * 86400)
    """Session length from create; the time while it is paused does not count."""
    on_timeout: OnEnd = OnEnd.KILL
    """What becomes of it when the session length is over."""
    idle_timeout_s: float | None = Field(None, ge=1, le=30 * 86400)
    """So long without a command, job, terminal, watch, transfer or preview connection: `on_idle`."""
    on_idle: OnEnd = OnEnd.PAUSE
    auto_resume: bool = True
    """A paused one is resumed by the next call to it, or visit of its previews."""
    snapshot: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = None
    """Begin with a snapshot, by id or name: its files, and its processes where it has them. Template, runtime, sizes,
    labels and network that are not given are the snapshot's; those given must fit it."""
    root_checkpoint_interval_s: float | None = Field(None, ge=0, le=86400)
    """So often what it has outside of /workspace is saved while it runs, should it be lost; 0: only by a pause; its
    node's own interval when not given."""
    labels: dict[LabelKey, Label] = Field(default_factory=dict, max_length=64)
    task: Annotated[str, StringConstraints(max_length=128)] | None = None
    network: NetworkPolicy = Field(default_factory=NetworkPolicy)
    """What it may reach; the workspace's policy holds beside it."""
    alarms: list[AlarmRule] = Field(default_factory=list, max_length=MAX_ALARMS)
    """What it may use for a while, and what becomes of it then; those of workspace and installation hold beside it."""
    packs: dict[PackPath, PackName] = Field(default_factory=dict, max_length=MAX_PACKS)
    """Data packs by where they lie, read only."""

    @field_validator("max_processes", mode="before")
    @classmethod
    def _processes_for_memory(cls, value: object, info: ValidationInfo) -> object:
        # The smallest program costs gVisor about 1 MiB: a fork bomb should meet the process limit before the memory's.
        return min(512, info.data.get("memory_mib", 2048) // 2) if value is None else value


class SandboxUpdate(Request):
    timeout_s: float | None = Field(None, gt=0, le=30 * 86400)
    """New session length, counted from now."""
    labels: dict[LabelKey, Label] | None = Field(None, max_length=64)
    packs: dict[PackPath, PackName] | None = Field(None, max_length=MAX_PACKS)
    """Data packs that it is to have at these paths. Refused (`packs_fixed`) unless it was made with them: no runtime
    takes any into a sandbox that runs."""


class Sandbox(Answer):
    id: str
    name: str | None = None
    workspace: str
    state: SandboxState
    reason: str = ""
    """Why it is failed, lost, stopped or paused by itself, or what did not come back of what was saved; empty while all
    is well."""
    template: str
    template_digest: str = ""
    runtime: str = ""
    isolation: Isolation | None = None
    isolation_detail: str = ""
    node: str = ""
    generation: int = 1
    cpu: int
    memory_mib: int
    disk_mib: int
    max_processes: int
    timeout_s: float
    on_timeout: OnEnd = OnEnd.KILL
    idle_timeout_s: float | None = None
    on_idle: OnEnd = OnEnd.PAUSE
    auto_resume: bool = True
    root_checkpoint_interval_s: float | None = None
    snapshot: str | None = None
    """Id of the snapshot that it began with."""
    started_from: StartedFrom | None = None
    """How it came to be; none while it is being created."""
    labels: dict[str, str] = Field(default_factory=dict)
    packs: dict[str, AttachedPack] = Field(default_factory=dict)
    """Data packs that it has, by where they lie."""
    task: str | None = None
    network: NetworkPolicy = Field(default_factory=NetworkPolicy)
    alarms: list[AlarmRule] = Field(default_factory=list)
    active_alarms: list[ActiveAlarm] = Field(default_factory=list)
    """What it uses too much of now, by its own rules and those of workspace and installation."""
    created_at: datetime
    started_at: datetime | None = None
    expires_at: datetime | None = None
    """When its session ends; none while it is paused."""
    paused_at: datetime | None = None
    left_s: float | None = None
    """While it is paused: the session time it has left."""
    ended_at: datetime | None = None
    recreated: Recreated | None = None
    """Of one that was lost and runs again: what it began with."""
    resumed_from: Literal["memory", "files"] | None = None
    """What its last resume took up: all of it, or its files alone, with its programs gone; `reason` says why."""
    restore_incomplete: list[str] | None = None
    """What that resume did not bring back of what ran and listened when it was paused, as the sandbox told it then."""


class Access(Answer):
    """The way to a sandbox's data plane: base URL of its gateway and a short-lived ticket for it."""

    data_url: str
    ticket: str
    expires_at: datetime


class SandboxCreated(Answer):
    sandbox: Sandbox
    access: Access


class SandboxList(Answer):
    sandboxes: list[Sandbox]
    """Newest first."""
