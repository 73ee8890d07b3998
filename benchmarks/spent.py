"""Processor time that an instance has taken, by part, and the memory of its sandboxes."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cpuos.testing.instance import Instance
from cpuos.testing.memory import pss_mib

__all__ = ["Spent", "sandboxes_pss_mib"]

_GROUPS = Path("/sys/fs/cgroup")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of one processor, user's and system's."""

    parts: dict[str, float]
    """Of each daemon with its workers and with what it has run and seen the end of."""
    sandboxes: float
    """Of all that ran in sandboxes' control groups, also those that have ended."""

    @classmethod
    def until_now(cls, instance: Instance) -> Self:
        parts = {part: _with_children(pid) for part, pid in instance.pids().items()}
        return cls(parts=parts, sandboxes=_of_sandboxes(instance))

    def since(self, before: Self) -> Self:
        parts = {part: spent - before.parts.get(part, 0.0) for part, spent in self.parts.items()}
        return type(self)(parts=parts, sandboxes=self.sandboxes - before.sandboxes)

    def shown(self, *, per: float = 1.0) -> dict[str, float]:
        """Milliseconds over `per`."""
        told = {**self.parts, "sandboxes": self.sandboxes}
        told["all"] = sum(told.values())
        return {part: round(1e3 * seconds / per, 2) for part, seconds in told.items()}


def sandboxes_pss_mib(instance: Instance) -> float:
    """Of all processes of all sandboxes; what they share counts once."""
    total = 0.0
    for listed in _group(instance, "memory").glob("*/cgroup.procs"):
        for pid in listed.read_text().split():
            with suppress(OSError):
                total += pss_mib(int(pid))
    return total


def _with_children(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except OSError:  # it has just ended, and then counts with its parent
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S + sum(map(_with_children, children))


def _of_sandboxes(instance: Instance) -> float:
    try:
        if (_GROUPS / "cgroup.controllers").exists():
            return int((_group(instance, "cpu") / "cpu.stat").read_text().split()[1]) / 1e6
        return int((_group(instance, "cpuacct") / "cpuacct.usage").read_text()) / 1e9
    except FileNotFoundError:  # there was none yet
        return 0.0


def _group(instance: Instance, controller: str) -> Path:
    own = f"cpuos-{instance.settings.instance_id}"
    group = _GROUPS / controller / own
    return group if group.exists() else _GROUPS / own
