"""The control groups of an instance, for the cases in which no node is there to end what runs in them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cpuos.services.processes import find_process, kill_process
from cpuos.settings import Settings

__all__ = ["kill_sandbox_processes", "remove_groups", "running_sandboxes"]

ROOT = Path("/sys/fs/cgroup")


def running_sandboxes(settings: Settings, *, root: Path = ROOT) -> set[str]:
    """Ids of this instance's sandboxes in whose groups a process runs."""
    tops = _groups(f"cpuos-{settings.instance_id}", root)
    return {group.name for top in tops for group in top.iterdir() if group.is_dir() and _pids(group)}


def kill_sandbox_processes(settings: Settings, *, root: Path = ROOT) -> int:
    """Kill every process in the groups of this instance's sandboxes; returns how many there were."""
    killed = 0
    for _ in range(3):  # what is being killed may still start something
        pids = {pid for top in _groups(f"cpuos-{settings.instance_id}", root) for pid in _pids(top)}
        for pid in pids:
            if (process := find_process(pid)) is not None:
                kill_process(process, grace_s=0)
                killed += 1
        if not pids:
            break
    return killed


def remove_groups(settings: Settings, *, root: Path = ROOT) -> list[str]:
    """Remove the instance's groups, innermost first."""
    removed = []
    for name in (f"cpuos-{settings.instance_id}", f"cpuos-{settings.instance_id}-parts"):
        for top in _groups(name, root):
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            removed.append(f"control group {top}")
    return removed


def _groups(name: str, root: Path) -> list[Path]:
    """In the one hierarchy of v2, or in each of v1."""
    if not root.is_dir():
        return []
    hierarchies = [root, *(path for path in root.iterdir() if path.is_dir())]
    return [group for hierarchy in hierarchies if (group := hierarchy / name).is_dir()]


def _pids(top: Path) -> set[int]:
    found: set[int] = set()
    for folder, _, _ in os.walk(top):
        with contextlib.suppress(OSError):
            found |= {int(line) for line in (Path(folder) / "cgroup.procs").read_text().split()}
    return found
