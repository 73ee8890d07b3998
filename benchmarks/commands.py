"""exec of `true`: the public SDK on a kept connection against gVisor's control socket."""

from __future__ import annotations

import time

from benchmarks.results import Measured, compare_times
from benchmarks.stage import Stage

__all__ = ["exec_true"]


def exec_true(stage: Stage) -> Measured:
    product, bare = [], []
    sandbox, control = stage.sandbox, stage.control
    for _ in range(max(200, 80 * stage.rounds)):
        since = time.perf_counter()
        result = sandbox.exec(["true"])
        product.append(time.perf_counter() - since)
        if not result.ok:
            raise RuntimeError(f"exec failed: {result}")
        since = time.perf_counter()
        status = control.run(["true"])
        bare.append(time.perf_counter() - since)
        if status != 0:
            raise RuntimeError(f"bare exec failed: {status}")
    return compare_times(product, bare)
