"""The scheduler's interface: reserve, commit, release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cpuos.node.client import NodeClient
from cpuos.types.node import NodeFacts
from cpuos.types.sandbox import Isolation

__all__ = ["Capacity", "CapacityRules", "Demand", "NodeView", "Placement", "ReadyNews", "Scheduler"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one sandbox asks of a node."""

    template: str
    runtime: str
    """A runtime's name, or `auto`: the strongest that is available."""
    min_isolation: Isolation | None
    cpu: int
    memory_mib: int
    disk_mib: int
    allow_emulated: bool = False
    """Whether a microVM will do that is only emulated."""
    node: str | None = None
    """Only there: what it begins with lies on that node."""
    max_processes: int = 0
    snapshot: str | None = None
    """With the processes of this one."""
    for_anyone: bool = False
    """Nothing else of it is fixed: one that is ready will do."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a sandbox goes and how it is isolated there."""

    node: str
    runtime: str
    isolation: Isolation
    isolation_detail: str
    template_digest: str
    ready: str | None = None
    """The id of a sandbox that is ready there: it is this one, and its reservation goes by that id."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a node can hold, or what of it is taken; the same four numbers for both."""

    sandboxes: int = 0
    cpu: float = 0
    memory_mib: int = 0
    disk_mib: int = 0

    @classmethod
    def of(cls, demand: Demand) -> Capacity:
        """What one sandbox takes while it runs."""
        return cls(sandboxes=1, cpu=demand.cpu, memory_mib=demand.memory_mib, disk_mib=demand.disk_mib)

    def plus(self, other: Capacity) -> Capacity:
        return Capacity(
            sandboxes=self.sandboxes + other.sandboxes,
            cpu=self.cpu + other.cpu,
            memory_mib=self.memory_mib + other.memory_mib,
            disk_mib=self.disk_mib + other.disk_mib,
        )

    def minus(self, other: Capacity) -> Capacity:
        return Capacity(
            sandboxes=self.sandboxes - other.sandboxes,
            cpu=self.cpu - other.cpu,
            memory_mib=self.memory_mib - other.memory_mib,
            disk_mib=self.disk_mib - other.disk_mib,
        )

    @property
    def parked(self) -> Capacity:
        """What is left of it while the sandbox is paused: its disk."""
        return Capacity(disk_mib=self.disk_mib)


@dataclass(frozen=True, kw_only=True)
class CapacityRules:
    """What of a node may be promised: memory and disk as they are, less a reserve; CPUs several times over."""

    cpu_overcommit: float = 8.0
    memory_overcommit: float = 1.0
    memory_reserve_mib: int = 0
    disk_overcommit: float = 1.0
    disk_reserve_mib: int = 0
    allow_emulated: bool = False
    """For every demand, whether it says so or not."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node as placement sees it: its last facts, and what is reserved on it."""

    facts: NodeFacts
    total: Capacity
    """What may be promised: of some things more than there is, of memory and disk less a reserve."""
    reserved: Capacity

    @property
    def machine(self) -> Capacity:
        """What there is."""
        facts = self.facts
        return Capacity(
            sandboxes=facts.max_sandboxes, cpu=facts.cpu, memory_mib=facts.memory_mib, disk_mib=facts.disk_mib
        )


@dataclass(frozen=True, kw_only=True)
class ReadyNews:
    """Ids of sandboxes."""

    ready: frozenset[str]
    """Those included that were given away a moment ago."""
    taken: frozenset[str]
    """Not there any more, for they were given away."""


class Scheduler(Protocol):
    """Owns the reservations of sandboxes and snapshots. `reserve` and `hold` are one step each: of two callers for the
    last room, one gets it."""

    async def refresh(self) -> None:
        """Ask the nodes for their facts. A node out of reach keeps its last ones and takes no new sandbox."""
        ...

    def reserve(self, sandbox_id: str, demand: Demand) -> Placement:
        """Take room or raise: template_not_found, runtime_unavailable, capacity_exceeded, node_unavailable. It is held
        under this id, or under that of the ready sandbox that the placement names."""
        ...

    def commit(self, sandbox_id: str) -> None:
        """The sandbox is on record; its reservation holds until `release`."""
        ...

    def release(self, sandbox_id: str) -> None:
        """Give the room back, and a ready sandbox whose create came to nothing. Nothing reserved is fine."""
        ...

    def hold(self, key: str, *, node: str, amount: Capacity, action: str) -> None:
        """Make what `key` holds on the node this much, committed. More than is free is capacity_exceeded, with nothing
        changed; less always passes."""
        ...

    def park(self, key: str) -> None:
        """Of what `key` holds only the disk is needed now. Nothing held is fine."""
        ...

    def adopt(self, held: Mapping[str, tuple[str, Capacity]]) -> None:
        """Hold exactly these committed reservations (key to node and amount), as the records say after a restart."""
        ...

    async def follow_ready(self) -> ReadyNews:
        """Hear which sandboxes are ready; returns at the next news, or after some time without any."""
        ...

    def nodes(self) -> Sequence[NodeView]: ...

    def client(self, node: str) -> NodeClient:
        """The way to a node."""
        ...
