"""An instance whose daemons live on the sealed host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpuos.node.network.hub import remove_host_network
from cpuos.node.network.namespaces import inside
from cpuos.testing.instance import Instance

__all__ = ["SealedInstance"]


class SealedInstance(Instance):
    """As `Instance`; its two ports are carried in, and nothing is carried out."""

    def __init__(self, *, netns: Path, forward: Callable[[int], Callable[[], None]], **values: Any) -> None:
        super().__init__(netns=netns, **values)
        self._netns = netns
        self._undo: list[Callable[[], None]] = []
        self._forward = forward

    def __enter__(self) -> SealedInstance:
        for port in (self.settings.api_port, self.settings.gateway_port):
            self._undo.append(self._forward(port))
        super().__enter__()
        return self

    def helper(self, name: str) -> int:
        """The process of one helper of the node (maker, dns, peek, records); 0: none."""
        node = self.pids()["node"]
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                parent = int(Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = Path("/proc", entry, "cmdline").read_text().split("\0")
            except (OSError, ValueError):
                continue
            if parent == node and any(word.endswith(f".{name}") for word in words):
                return int(entry)
        return 0

    def close(self) -> None:
        super().close()
        for undo in self._undo:
            undo()
        self._undo.clear()
        inside(self._netns, lambda: remove_host_network(self.settings.instance_id))
