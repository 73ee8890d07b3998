"""exec of `true`: the public SDK on a kept connection against gVisor's control socket."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.results import Measured, compare_times
from benchmarks.stage import Stage
from cpuos.runtimes.limits import ControlGroups

__all__ = ["exec_true"]


def exec_true(stage: Stage) -> Measured:
    """Beside it the processor time of sandbox, gateway and this process for both: it tells more on a busy machine."""
    product, bare = [], []
    work: dict[str, list[float]] = {"product": [], "bare": []}
    sandbox, control = stage.sandbox, stage.control
    for _ in range(max(200, 80 * stage.rounds)):
        before = _work_ms(stage)
        since = time.perf_counter()
        result = sandbox.exec(["true"])
        product.append(time.perf_counter() - since)
        between = _work_ms(stage)
        work["product"].append(between - before)
        if not result.ok:
            raise RuntimeError(f"exec failed: {result}")
        since = time.perf_counter()
        status = control.run(["true"])
        bare.append(time.perf_counter() - since)
        work["bare"].append(_work_ms(stage) - between)
        if status != 0:
            raise RuntimeError(f"bare exec failed: {status}")
    measured = compare_times(product, bare)
    spent = {name: round(statistics.median(values), 1) for name, values in work.items()}
    return replace(measured, detail={**measured.detail, "work_ms": spent})


def _work_ms(stage: Stage) -> float:
    """Processor time so far of all that takes part."""
    groups = ControlGroups(stage.instance.settings.instance_id)
    hosts = _cpu_s(stage.instance.pids()["gateway"]) + _cpu_s(os.getpid())
    return 1e3 * (groups.cpu_seconds(stage.sandbox.id) + hosts)


def _cpu_s(process: int) -> float:
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
