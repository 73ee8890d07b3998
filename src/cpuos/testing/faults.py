"""Faults at chosen steps of a node's verbs, and the check that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cpuos.node.daemon import NodeParts
from cpuos.settings import Settings
from cpuos.testing.node import InjectedFault

__all__ = ["Faults", "assert_nothing_left", "find_leftovers"]


class Faults:
    """A checkpoint that remembers the points it passed and raises once at each chosen one."""

    def __init__(self, *points: str, action: Callable[[str], None] | None = None) -> None:
        self.seen: list[str] = []
        self._left = set(points)
        self._action = action

    def __call__(self, point: str) -> None:
        self.seen.append(point)
        if point in self._left:
            self._left.remove(point)
            if self._action is not None:
                self._action(point)
            else:
                raise InjectedFault(point)

    def at(self, *points: str) -> None:
        self._left.update(points)

    @property
    def pending(self) -> set[str]:
        """Chosen points that were not reached yet."""
        return set(self._left)


async def find_leftovers(settings: Settings, parts: NodeParts) -> list[str]:
    """Everything of sandboxes that is on the host now: parts, work folders, records, mounts, processes."""
    found = [f"disk {name}" for name in await parts.disks.leftovers()]
    found += [f"slot {name}" for name in await parts.slots.leftovers()]
    for runtime in parts.runtimes.values():
        found += [f"{runtime.name} {name}" for name in await runtime.leftovers()]
    found += _files_left(settings)
    found += _mounts_left(settings)
    found += _processes_left(settings)
    return found


async def assert_nothing_left(settings: Settings, parts: NodeParts) -> None:
    left = await find_leftovers(settings, parts)
    assert not left, f"left behind: {left}"


def _files_left(settings: Settings) -> list[str]:
    state = settings.node_state_dir
    found = [f"work folder {name}" for name in _names(state / "sandboxes")]
    for name in _names(state / "journal"):
        if not name.endswith(".json") or '"gone"' not in (state / "journal" / name).read_text():
            found.append(f"record {name}")
    return found


def _mounts_left(settings: Settings) -> list[str]:
    places = (str(settings.state_dir) + "/", str(settings.run_dir / "fake") + "/")
    targets = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [f"mount {target}" for target in targets if target.startswith(places)]


def _processes_left(settings: Settings) -> list[str]:
    """Processes with a root, a working folder or a program's file below the instance's folders."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        for link in ("root", "cwd"):
            try:
                target = os.readlink(f"{entry.path}/{link}")
            except OSError:
                continue
            if target.startswith((str(settings.state_dir), str(settings.run_dir / "fake"))):
                found.append(f"process {entry.name} ({link} {target})")
                break
    return found


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []
