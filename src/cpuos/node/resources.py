"""What a sandbox needs of the host besides its runtime: a disk and a network slot. The node makes them first and takes
them away last; both find what they made again by the sandbox's id alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cpuos.runtimes.base import GuestLink
from cpuos.types.network import EffectivePolicy

__all__ = ["DiskRoom", "Disks", "Slots"]


@dataclass(frozen=True, kw_only=True)
class DiskRoom:
    """What /workspace can still take."""

    free_bytes: int
    free_inodes: int
    inodes: int


class Disks(Protocol):
    """One disk a sandbox. Every method bears "nothing there", and may be repeated after a crash."""

    def start(self) -> None:
        """Begin to make in advance what creates will want."""
        ...

    async def close(self) -> None:
        """Stop that, and remove what no sandbox took. Not started is fine."""
        ...

    async def create(self, sandbox_id: str, *, size_mib: int) -> Path:
        """Make and mount it; its folder has `workspace/` (1000:1000) and `overlay/` (root, 0700)."""
        ...

    def path(self, sandbox_id: str) -> Path:
        """The folder that `create` gives: derived, so that a restarted node knows it."""
        ...

    async def used_bytes(self, sandbox_id: str) -> int: ...

    async def room(self, sandbox_id: str) -> DiskRoom:
        """Of one that is mounted."""
        ...

    async def promised_bytes(self, *, of: Collection[str]) -> int:
        """What the disks of these sandboxes may still take of the volume: they are sparse."""
        ...

    async def park(self, sandbox_id: str) -> None:
        """Keep the files and nothing else: no mount, no device. `unpark` brings it back."""
        ...

    async def unpark(self, sandbox_id: str) -> Path: ...

    async def mark(self, sandbox_id: str) -> str:
        """Of a parked one, which is all on disk then: another one after any change. Empty: there is none."""
        ...

    def is_marked(self, sandbox_id: str, mark: str) -> bool:
        """Whether it has this mark still. It blocks, a moment."""
        ...

    def digest(self, sandbox_id: str, *, go_on: Callable[[], bool]) -> str | None:
        """Of what is on a parked one. It blocks, and asks often whether to go on: None when not."""
        ...

    async def sync(self, sandbox_id: str) -> None:
        """All that was written to it outlives the host when this returns."""
        ...

    async def thaw(self, sandbox_id: str) -> None:
        """Let go what a copy that was cut short by this node's end still holds."""
        ...

    async def copy(self, sandbox_id: str, *, to: Path) -> None:
        """Its content at one moment, at the new path `to`, for `create_from`; parked or not. Writers wait meanwhile.
        After a failure nothing is at `to`."""
        ...

    async def leave(self, sandbox_id: str, *, to: Path) -> None:
        """As `copy`, of one that nobody will write again: both may be the same file."""
        ...

    async def create_from(self, sandbox_id: str, *, image: Path, size_mib: int) -> Path:
        """As `create`, with the content of a copy of a disk of this size."""
        ...

    async def hand_over(
        self, sandbox_id: str, *, size_mib: int, image: Path | None = None, layer_comes: bool = False
    ) -> Path:
        """As `create` and `create_from`, for a guest with a kernel of its own: its folder has the images `image` and
        `root.image`, which the host does not mount, now or later."""
        ...

    async def remove(self, sandbox_id: str) -> None:
        """Unmount and remove it and all that `create` made."""
        ...

    async def leftovers(self) -> list[str]:
        """Ids of all disks of this instance that are on the host, whole or half-made."""
        ...


class Slots(Protocol):
    """One network slot a sandbox: a router namespace and a bare one. Same rules as for disks."""

    async def start(self) -> None:
        """Make what slots have in common, or take over what an earlier daemon made. Comes before all else."""
        ...

    async def close(self) -> None:
        """Let go: slots in use stay as they are, for a later `readopt`. Not started is fine."""
        ...

    async def take(self, sandbox_id: str, policy: EffectivePolicy, *, tap: bool = False) -> Path:
        """A slot with its bare namespace armed and this policy in force; the path of that namespace. With `tap` the
        router's namespace, in which the device `lan` waits for whoever opens it."""
        ...

    async def update(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        """Returns when this policy is in force and what it forbids is cut. May be repeated."""
        ...

    async def open(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        """As `update`, in a slot that let nothing through so far."""
        ...

    async def readopt(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        """After a restart of the node: open a taken slot again, with this policy. One that is open already is fine."""
        ...

    def path(self, sandbox_id: str) -> Path:
        """The bare namespace of a taken slot: derived, so that a restarted node knows it."""
        ...

    async def guest_link(self, sandbox_id: str) -> GuestLink:
        """A new socket made in the router namespace."""
        ...

    async def sent_bytes(self) -> dict[str, int]:
        """By sandbox: what left its slot for the outside since that was taken."""
        ...

    async def release(self, sandbox_id: str) -> None: ...

    async def leftovers(self) -> list[str]: ...
