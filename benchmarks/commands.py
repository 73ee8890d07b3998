"""exec of `true`: the public SDK on a kept connection against gVisor's control socket."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from benchmarks.results import Measured, compare_times
from benchmarks.stage import Stage
from benchmarks.work import work_so_far

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
    return 1e3 * sum(work_so_far(stage).values())
