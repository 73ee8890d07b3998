"""What the node tells of itself: capacity, templates, runtimes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cpuos.node import host
from cpuos.node.admission import Admission
from cpuos.node.packs import PackStore
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.templates import Templates
from cpuos.node.volume import Volume
from cpuos.types.node import NodeFacts, PressureFacts

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
    admission: Admission
    pressure: Callable[[], PressureFacts]
    packs: PackStore

    async def read(self) -> NodeFacts:
        return NodeFacts(
            node=self.name,
            version=version("cpuos"),
            boot_id=host.boot_id(),
            runtimes=await self.runtimes.facts(),
            templates=self.templates.facts(),
            cpu=host.cpu_count(),
            memory_mib=host.memory_mib(),
            disk_mib=self.admission.disk_mib,
            max_sandboxes=self.admission.rules.max_sandboxes,
            room=self.admission.facts(),
            pressure=self.pressure(),
            volume=self.volume.facts(),
            packs=self.packs.facts(),
        )
