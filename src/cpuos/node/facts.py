"""What the node tells of itself: capacity, templates, runtimes."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cpuos.node import host
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.templates import Templates
from cpuos.node.volume import Volume
from cpuos.types.node import NodeFacts

__all__ = ["NodeFactsReader", "read_name"]


def read_name(path: Path) -> str:
    """The node's name: the host's as it was at the first start. Records name the node, and a host may be renamed."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        name = socket.gethostname()
        draft = path.with_name(f".{path.name}")
        draft.write_text(f"{name}\n")
        draft.rename(path)
        return name


@dataclass(frozen=True, kw_only=True)
class NodeFactsReader:
    name: str
    volume: Volume
    """The one that holds the sandboxes' disks."""
    templates: Templates
    runtimes: RuntimeTable
    max_sandboxes: int

    async def read(self) -> NodeFacts:
        volume, disks = self.volume.facts(), self.volume.folder / "disks"
        return NodeFacts(
            node=self.name,
            version=version("cpuos"),
            boot_id=host.boot_id(),
            runtimes=await self.runtimes.facts(),
            templates=self.templates.facts(),
            cpu=host.cpu_count(),
            memory_mib=host.memory_mib(),
            # A sandbox may fill its number twice: /workspace and the root's writable layer (docs/adr/0006).
            disk_mib=(volume.free_bytes + volume.ballast_bytes + (host.held_disk_mib(disks) << 20)) // (2 << 20),
            max_sandboxes=self.max_sandboxes,
            volume=volume,
        )
