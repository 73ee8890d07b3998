"""What an installation has: templates, nodes, room, health."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cpuos.types.base import Answer
from cpuos.types.node import PressureFacts, RoomFacts, RuntimeFacts, TemplateFacts, VolumeFacts

__all__ = ["Amount", "Capacity", "Health", "Node", "NodeList", "PartHealth", "Pool", "TemplateList"]


class TemplateList(Answer):
    templates: list[TemplateFacts]


class Pool(Answer):
    """Sandboxes that are started before anyone asks, on one node. They take no room of anybody's."""

    ready: int
    memory_mib: int
    """What they take."""
    budget_mib: int
    """What they may take; 0: none are made."""
    taken: int
    """Creates that got one, since the node's daemon started."""
    missed: int
    """Creates that one would have done for, and that found none."""


class Node(Answer):
    name: str
    version: str
    reachable: bool
    runtimes: list[RuntimeFacts]
    templates: list[TemplateFacts]
    cpu: int
    memory_mib: int
    disk_mib: int
    max_sandboxes: int
    room: dict[str, RoomFacts] = Field(default_factory=dict)
    """By the node's own count: what it may promise, and what it has."""
    pressure: PressureFacts = Field(default_factory=PressureFacts)
    volume: VolumeFacts | None = None
    pool: Pool | None = None


class NodeList(Answer):
    nodes: list[Node]


class Amount(Answer):
    total: float
    """What may be promised: with the overcommit, less the reserve."""
    reserved: float
    """What is promised."""
    machine: float
    """What the nodes have. Of disk it is half of their volumes, for a sandbox may fill its number twice."""


class Capacity(Answer):
    """Room for sandboxes over all nodes."""

    sandboxes: Amount
    cpu: Amount
    memory_mib: Amount
    disk_mib: Amount


class PartHealth(Answer):
    status: Literal["ok", "unavailable"]
    reason: str = ""


class Health(Answer):
    status: Literal["ok", "degraded"]
    """degraded: a part is out of reach."""
    version: str
    parts: dict[str, PartHealth] = Field(default_factory=dict)
    alarms: list[str] = Field(default_factory=list)
    """What somebody has to mend, one sentence each."""
