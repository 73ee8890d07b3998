"""Processor time of all that takes part in a call: on a busy machine it tells more than the clock."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.stage import Stage
from cpuos.runtimes.limits import ControlGroups

__all__ = ["Work", "more_since", "work_so_far"]

Work = dict[str, float]
"""Seconds by part: sandbox, gateway, and client, which is this process."""


def work_so_far(stage: Stage) -> Work:
    groups = ControlGroups(stage.instance.settings.instance_id)
    return {
        "sandbox": groups.cpu_seconds(stage.sandbox.id),
        "gateway": _cpu_s(stage.instance.pids()["gateway"]),
        "client": _cpu_s(os.getpid()),
    }


def more_since(before: Work, now: Work) -> Work:
    return {part: now[part] - before[part] for part in now}


def _cpu_s(process: int) -> float:
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
