"""The one interface of all runtimes. A runtime has few required methods; the rest is declared as capabilities.

A runtime owns the process tree of a sandbox and nothing else: the node's service makes the disk and the network slot
first and takes them away last. Every method is idempotent towards "nothing there", and safe to repeat after a crash.
The conformance suite in `cpuos.testing.conformance` is the long form of this contract.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from cpuos.types.sandbox import Isolation

__all__ = [
    "Capability",
    "DeviceRates",
    "GuestLink",
    "Probe",
    "Process",
    "Runtime",
    "RuntimeLimits",
    "RuntimeStats",
    "SandboxSpec",
]

# The guest side has the same addresses in every sandbox (network-facts.md section 2); the namespace tells them apart.
GUEST_ADDRESS = "10.0.0.2"
ROUTER_ADDRESS = "10.0.0.1"
# tcpmux: privileged, so no program of the sandbox user can take it, and unused in practice.
AGENT_PORT = 1


class Capability(StrEnum):
    PAUSE = "pause"
    SNAPSHOT = "snapshot"
    FILESYSTEM_CHECKPOINT = "filesystem_checkpoint"
    TRACE = "trace"
    PACKS = "packs"
    """Read-only images at paths of the sandbox, from its start on."""
    OWN_KERNEL = "own_kernel"
    """Its guests have a kernel of their own: they get the disk as images that the host never mounts again, and the
    network as a tap."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What booting something proved about this host."""

    available: bool
    isolation: Isolation
    detail: str
    reason: str = ""
    """Why it is not available, with the command that mends it."""


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """All that a runtime needs to start one sandbox. Every path was derived by the node from ids."""

    id: str
    generation: int
    hostname: str
    cpu: int
    memory_mib: int
    disk_mib: int
    max_processes: int
    template_image: Path
    """EROFS, read only, shared by all sandboxes of the template."""
    workdir: Path
    """The node's folder of this sandbox (0700): bundle, logs. Exists."""
    disk: Path
    """This sandbox's disk: `workspace/` (mounted ext4, owner 1000:1000) and `overlay/` (root, 0700; for the root's
    writable layer). Each holds `disk_mib`. With Capability.OWN_KERNEL: two ext4 images that nobody mounts, `image` for
    /workspace and `root.image` for the layer."""
    netns: Path
    """Bare network namespace, armed with eth0 at GUEST_ADDRESS. With Capability.OWN_KERNEL: that of the router, in
    which the tap `lan` waits."""
    agent: Path
    """Folder with the static guest agent `cpuos-agent`, given to the guest read only."""
    node_public_key: bytes
    """Raw Ed25519 key (32 bytes): all that the guest ever holds."""
    packs: tuple[tuple[str, Path], ...] = ()
    """With Capability.PACKS: where in the sandbox, and the EROFS image that lies there; shared, read only."""
    own_kernel: bool = False
    """Capability.OWN_KERNEL: disk and network are of that kind."""
    idly: bool = False
    """Nobody waits for its start: it takes what processor time others leave, and is as any other once it runs."""


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What the devices of one sandbox do a second at most, where its VMM counts; 0: no limit."""

    disk_mib_per_s: int = 0
    """Of each disk."""
    disk_operations_per_s: int = 0
    network_mib_per_s: int = 0
    """Each way."""
    network_packets_per_s: int = 0


@dataclass(frozen=True, kw_only=True)
class Process:
    """Identity of the sandbox's main host process: safe against reuse of its number."""

    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat, clock ticks since boot."""


@dataclass(frozen=True, kw_only=True)
class RuntimeStats:
    memory_bytes: int
    cpu_seconds: float
    processes: int


@dataclass(frozen=True, kw_only=True)
class RuntimeLimits:
    """Those limits of a sandbox that its runtime keeps, as they stand at one moment."""

    processes_full: bool = False
    root_full: bool = False
    """The root's writable layer has no room."""
    tmp_bytes: int = 0
    """What /tmp may hold, and /dev/shm again; 0: no limit of their own."""


@dataclass(frozen=True, kw_only=True)
class GuestLink:
    """An unconnected socket made where the guest is reachable, and where to connect it."""

    socket: socket.socket
    address: tuple[str, int] | str


class Runtime(Protocol):
    name: ClassVar[str]
    isolation: ClassVar[Isolation]
    capabilities: ClassVar[frozenset[Capability]]

    async def probe(self) -> Probe:
        """Boot something, wait for its word with a time limit, and say what was proved."""
        ...

    async def start(self, spec: SandboxSpec, *, root: Path | None = None) -> Process:
        """Start the sandbox with the agent as PID 1; return when its process runs (the agent may answer later).

        `root` is given only with Capability.FILESYSTEM_CHECKPOINT: the layer above the template begins as it was saved.
        On any failure nothing of it is left. Limits (cpu, memory, processes) hold before the first guest instruction.
        """
        ...

    async def adopt(self, spec: SandboxSpec, process: Process) -> bool:
        """After a restart of the node: take over the watch of a running sandbox; False when it is not there."""
        ...

    async def wait(self, sandbox_id: str) -> str:
        """Return when the sandbox's process has ended, with the reason as far as the host can tell."""
        ...

    async def halt(self, sandbox_id: str) -> None:
        """All its processes stand still at once, until `proceed`, also after a restart of the node. May be repeated."""
        ...

    async def proceed(self, sandbox_id: str) -> None:
        """They go on. Not halted is fine."""
        ...

    async def destroy(self, sandbox_id: str) -> None:
        """End the sandbox, halted or not, and remove all that `start` made. Nothing there is fine."""
        ...

    async def stats(self, sandbox_id: str) -> RuntimeStats: ...

    def cpu_seconds(self, sandbox_id: str) -> float:
        """What all its host processes have used since it was started, those that have ended too. Nothing that runs in
        it is asked, and it is a file's read: OSError where it is gone."""
        ...

    def host_processes(self, max_processes: int) -> int:
        """How many of the host's processes and threads a sandbox with this limit can take at most."""
        ...

    def layer_bytes(self, sandbox_id: str) -> int:
        """What the root's writable layer has taken of the data volume in files that have no name. Blocking."""
        ...

    async def limits(self, spec: SandboxSpec) -> RuntimeLimits:
        """Measured from outside: a program inside cannot make it say that a limit is not reached."""
        ...

    # with Capability.PAUSE

    @property
    def image_version(self) -> str:
        """Of what is started now. Images are taken by exactly the version that made them."""
        ...

    def version_of(self, sandbox_id: str) -> str:
        """Of the version that an image of this sandbox would be; after an upgrade that can be an older one."""
        ...

    def takes(self, version: str) -> bool:
        """Whether images of this version can be taken up here: older ones are, while their programs are kept."""
        ...

    async def image_bytes(self, sandbox_id: str) -> int:
        """What images of its memory and of its root take together, at most, if it does not grow meanwhile."""
        ...

    async def checkpoint(self, sandbox_id: str, *, image: Path) -> None:
        """Write memory, processes and the root's writable layer into the new folder `image`. The sandbox runs on, also
        after a failure, which leaves no `image`. Files of /workspace are not in it: copy the disk along with it."""
        ...

    async def restore(self, spec: SandboxSpec, *, image: Path) -> Process:
        """As `start`, from an image that a sandbox of the same template, agent, runtime version, cpu, memory, disk
        size and process limit made, in whatever network namespace, disk and id. `image` is read only."""
        ...

    # with Capability.FILESYSTEM_CHECKPOINT

    async def save_root(self, sandbox_id: str, *, image: Path) -> None:
        """Write the root's writable layer into the new folder `image`, for a `start` with the same template and disk
        size; runtimes of other versions take it too. The sandbox runs on, also after a failure, which leaves no
        `image`."""
        ...

    # with Capability.FILESYSTEM_CHECKPOINT and Capability.OWN_KERNEL

    async def save_dead_root(self, disk: Path, *, image: Path) -> None:
        """As `save_root`, of a sandbox that died and left this disk: as it was then."""
        ...

    async def leftovers(self) -> list[str]:
        """Ids of all sandboxes that this runtime finds on the host, also those it did not start itself."""
        ...

    async def close(self) -> None:
        """Stop watching and let go; sandboxes run on, for a later `adopt`."""
        ...
