"""What a node tells the server: facts, never states."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from cpuos.types.base import Answer, Request
from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy, PolicyLayer
from cpuos.types.pack import MAX_PACKS, PackFacts, PackImage, PackPath
from cpuos.types.sandbox import SANDBOX_ID_PATTERN, Isolation, StartedFrom

__all__ = [
    "Drained",
    "NodeFacts",
    "NodeGeneration",
    "NodeNetworkUpdate",
    "NodePause",
    "NodeRepause",
    "NodeResume",
    "NodeSandboxCreate",
    "NodeSnapshotCreate",
    "PoolFacts",
    "PressureFacts",
    "PressureLevel",
    "ReadySandbox",
    "Restored",
    "RoomFacts",
    "RuntimeFacts",
    "SandboxFacts",
    "SandboxStats",
    "SandboxUsage",
    "SnapshotFacts",
    "TemplateFacts",
    "Usage",
    "VolumeFacts",
]

SandboxId = Annotated[str, StringConstraints(pattern=SANDBOX_ID_PATTERN)]
SnapshotId = Annotated[str, StringConstraints(pattern=SANDBOX_ID_PATTERN)]
FreezeNonce = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""By it a frozen guest knows who may thaw it (api/guest.md)."""


class Restored(StrEnum):
    """What a sandbox began with, the most first."""

    MEMORY = "memory"
    """Processes and all files."""
    ROOT = "root"
    """All files; processes started anew."""
    WORKSPACE = "workspace"
    """The files in /workspace alone."""
    NOTHING = "nothing"
    """Its template."""


def _nothing() -> EffectivePolicy:
    off = PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))
    return EffectivePolicy(version=1, layers=[off])


class NodeSandboxCreate(Request):
    """Ids and numbers only: no path, argument or flag crosses this line."""

    id: SandboxId
    generation: int = Field(ge=1)
    template: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    runtime: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,16}$")]
    hostname: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    cpu: int = Field(ge=1, le=64)
    memory_mib: int = Field(ge=128, le=1 << 20)
    disk_mib: int = Field(ge=64, le=1 << 22)
    max_processes: int = Field(ge=16, le=32768)
    network: EffectivePolicy = Field(default_factory=_nothing)
    """In place before the first instruction of the guest; who says nothing gets nothing."""
    snapshot: SnapshotId | None = None
    """Begin with what this snapshot holds; template, runtime and sizes must be its own."""
    warm: bool = True
    """With its processes, where the snapshot has them; else only with its files."""
    packs: dict[PackPath, PackImage] = Field(default_factory=dict, max_length=MAX_PACKS)
    """What lies where, read only. Processes that were saved go on with exactly what they had."""
    ready: bool = False
    """Take the ready sandbox of this id, or refuse: `sandbox_not_ready`, and nothing is made."""
    root_interval_s: float | None = Field(None, ge=0)
    """So often what it has outside of /workspace is saved while it runs; 0: never; None: as its node does."""


class NodeNetworkUpdate(Request):
    generation: int = Field(ge=1)
    policy: EffectivePolicy
    """Put in place unless a newer version is already."""


class NodeGeneration(Request):
    """A call that needs nothing but to name the generation it is made for."""

    generation: int = Field(ge=1)


class Drained(Answer):
    """What a node's shutdown has paused, and what runs on, with the reason of each."""

    paused: list[str]
    left: dict[str, str]


class NodePause(Request):
    generation: int = Field(ge=1)
    freeze: FreezeNonce
    """The guest is frozen with this one already."""
    labels: dict[str, str] | None = None
    """Those of its record, for its resume to be held against."""


class NodeResume(Request):
    generation: int = Field(ge=1)
    network: EffectivePolicy
    """In place before the guest goes on. Of another history than the one that the node has, both hold."""
    labels: dict[str, str] | None = None
    """Those that the record has of the pause; None: it was not told of it."""
    memory: bool = True
    """With its processes; else with its files alone, which another version of the runtime takes too."""
    incomplete: bool = False
    """Also where not all is there that there was; else that is refused, and nothing is begun."""


class NodeRepause(Request):
    generation: int = Field(ge=1)
    frozen: bool = False
    """Its guest has refused to go on: what was saved of its processes stays good."""


class NodeSnapshotCreate(Request):
    generation: int = Field(ge=1)
    snapshot: SnapshotId
    freeze: FreezeNonce | None = None
    """As for a pause; a paused sandbox needs none."""
    memory: bool = True
    """Its processes too; else its files alone."""


class RuntimeFacts(Answer):
    name: str
    available: bool
    isolation: Isolation
    detail: str
    reason: str = ""


class TemplateFacts(Answer):
    name: str
    digest: str
    size_bytes: int
    built: bool = False
    """Made by a build of a workspace; on a node it has the image's name, which only the server knows to whom it
    belongs."""


class PressureLevel(StrEnum):
    """What is done about it; each includes those before it."""

    NONE = "none"
    SHRINK_POOL = "shrink_pool"
    PAUSE_IDLE = "pause_idle"
    REFUSE_NEW = "refuse_new"

    @property
    def rank(self) -> int:
        return list(PressureLevel).index(self)


class PressureFacts(Answer):
    """Whether the host is short of memory."""

    level: PressureLevel = PressureLevel.NONE
    why: str = ""
    since: datetime | None = None
    """When this level began."""
    times: int = 0
    """How often a level was entered since the node's daemon began."""


class RoomFacts(Answer):
    """Of one resource: what the node may promise, and what it has."""

    total: float
    held: float


class VolumeFacts(Answer):
    """The volume that holds disks, snapshots and images."""

    full: bool
    """Nothing is begun on it that writes, and sandboxes stand still, until there is room."""
    times_full: int = 0
    """How often it was since the node's daemon began."""
    total_bytes: int
    free_bytes: int
    ballast_bytes: int
    """Held so that there is something to give up when it is full."""


class ReadySandbox(Answer):
    """A sandbox that was started before anyone asked: a create with its id and these values gets it."""

    id: str
    template: str
    template_digest: str
    runtime: str
    cpu: int
    memory_mib: int
    disk_mib: int
    max_processes: int
    snapshot: str | None = None
    """It has the processes of this one."""


class PoolFacts(Answer):
    seq: int = 0
    """Another number whenever there is other news."""
    ready: list[ReadySandbox] = Field(default_factory=list)
    memory_mib: int = 0
    """What they take."""
    budget_mib: int = 0
    """What they may take; 0: none are made."""
    filled: int = 0
    """How many this daemon has made."""
    taken: int = 0
    """Creates that got one."""
    missed: int = 0
    """Creates that one would have done for, and found none."""


class NodeFacts(Answer):
    node: str
    version: str
    boot_id: str
    runtimes: list[RuntimeFacts]
    templates: list[TemplateFacts]
    cpu: int
    memory_mib: int
    disk_mib: int
    """The sum of `disk_mib` that sandboxes may be promised, those that are there included."""
    max_sandboxes: int
    room: dict[str, RoomFacts] = Field(default_factory=dict)
    """By the node's own count: sandboxes, cpu, memory_mib, processes, disk_mib (of which a sandbox's number counts
    twice)."""
    pressure: PressureFacts = Field(default_factory=PressureFacts)
    pool: PoolFacts = Field(default_factory=PoolFacts)
    volume: VolumeFacts | None = None
    packs: list[PackFacts] = Field(default_factory=list)


class SandboxFacts(Answer):
    id: str
    generation: int
    alive: bool
    started_from: StartedFrom = StartedFrom.COLD
    exit_reason: str = ""
    """Why it is not alive, as far as the host can tell."""
    paused: bool = False
    """It has no process and no memory here, only files; it is alive and can go on."""
    pause_reason: str = ""
    """Why it is paused again, where nobody asked for it; of one that was resumed, why not all came back."""
    paused_at: datetime | None = None
    """Since when, while it is."""
    settled: bool = True
    """False between a resume and its settle: the image is kept, and a repause is possible."""
    incarnation: int = 0
    """How often its processes were taken up again, each time with a session key of its own."""
    restored: Restored = Restored.NOTHING
    """What it began with in this incarnation."""
    restored_at: datetime | None = None
    """When what it began with was saved."""
    missing: list[str] = Field(default_factory=list)
    """What of that which was kept of it is not as it was, though it was taken up."""
    runtime: str
    isolation: Isolation
    isolation_detail: str
    template: str
    template_digest: str
    started_at: datetime | None = None


class SandboxStats(Answer):
    id: str
    memory_bytes: int
    cpu_seconds: float
    processes: int
    disk_used_bytes: int


class Usage(Answer):
    """Totals of a sandbox that only rise: over its pauses too, in which its own time stands still."""

    ran_s: float = 0.0
    """How long it ran."""
    cpu_seconds: float = 0.0
    """Of all its processes, as its control group counts them."""
    sent_bytes: int = 0
    """What its router let out."""

    def __add__(self, more: Usage) -> Usage:
        return Usage(
            ran_s=self.ran_s + more.ran_s,
            cpu_seconds=self.cpu_seconds + more.cpu_seconds,
            sent_bytes=self.sent_bytes + more.sent_bytes,
        )


class SandboxUsage(Usage):
    id: str
    generation: int


class SnapshotFacts(Answer):
    """What is kept on this node under a snapshot's id."""

    id: str
    sandbox: str
    """The sandbox it was made of."""
    generation: int
    incarnation: int
    memory: bool
    """Processes can go on from it; without them it holds files alone."""
    root: bool
    """It holds the files outside of /workspace apart from the processes' memory."""
    size_bytes: int
    """What it takes on the data volume; blocks shared with others count in each."""
    template: str
    template_digest: str
    runtime: str
    runtime_version: str
    cpu: int
    memory_mib: int
    disk_mib: int
    max_processes: int
    created_at: datetime
    root_at: datetime | None = None
    """When its root was saved; before the rest where its sandbox had died."""
