"""How Firecracker's jailer is called, and started with what it is to lock up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cpuos.runtimes.microvm import jailer_entry
from cpuos.runtimes.microvm.launch import Launch, spawn

__all__ = ["Bind", "jail_plan", "start_jailer"]

Bind = tuple[Path, str, bool]
"""A file or folder, where it is in the jail, and whether it is written."""

_ROOT_MIB = 32
_DESCRIPTORS = 1024
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def jail_plan(
    plan: Launch, *, jailer: Path, program: Path, binds: list[Bind], largest_file: int, arguments: list[str]
) -> dict[str, object]:
    """All that `jailer_entry` is told. `largest_file`: so many bytes may a file have that the VMM writes."""
    program = Path(os.path.realpath(program))
    base = Path(os.path.realpath(plan.root))
    words = [str(jailer), "--id", plan.name, "--exec-file", str(program), "--chroot-base-dir", str(base)]
    words += ["--uid", str(plan.uid), "--gid", str(plan.uid)]
    words += ["--resource-limit", f"no-file={_DESCRIPTORS}", "--resource-limit", f"fsize={largest_file}"]
    if plan.tap is not None:
        words += ["--netns", str(plan.tap[1])]
    return {
        "argv": [*words, *_group_words(plan), "--", *arguments],
        "environment": _ENVIRONMENT,
        "base": str(base),
        # As the jailer names it, after the program behind all links.
        "root": str(base / program.name / plan.name / "root"),
        "size_mib": _ROOT_MIB,
        "uid": plan.uid,
        "groups": [str(group) for group in plan.groups],
        "tap": None if plan.tap is None else [str(plan.tap[1]), plan.tap[2]],
        "binds": [[str(source), target, writable] for source, target, writable in binds],
    }


def start_jailer(plan: Mapping[str, object]) -> tuple[int, int]:
    """Its process number, which becomes the VMM's, and a descriptor of what it says. Raises OSError."""
    return spawn(jailer_entry.__file__, plan)


def _group_words(plan: Launch) -> list[str]:
    """It is in its groups by then, with their limits: the jailer finds it there, and moves it nowhere else."""
    if not plan.groups:
        return []
    unified = (plan.groups[0].parent.parent / "cgroup.controllers").exists()
    parent = "/".join(plan.groups[0].parts[-2:] if unified else plan.groups[0].parts[-2:-1])
    return ["--cgroup-version", "2" if unified else "1", "--parent-cgroup", parent]
