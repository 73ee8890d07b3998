"""What an idle sandbox weighs, and how long imports and the command line's help take."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.results import Measured, percentile
from benchmarks.stage import Stage
from cpuos import Sandbox
from cpuos.testing.memory import pss_mib

__all__ = ["help_time", "idle_weight", "import_time"]

_IDLE = 3
_SETTLE_S = 3.0
_IMPORT_ALL = "import cpuos; [getattr(cpuos, name) for name in cpuos.__all__]"


def idle_weight(stage: Stage) -> Measured:
    """Each of three alike sandboxes that have run one command; pages that they share are split among them."""
    sandboxes = []
    try:
        for _ in range(_IDLE):
            sandboxes.append(Sandbox.create(client=stage.client, disk="256MiB"))
            sandboxes[-1].exec(["true"], check=True)
        time.sleep(_SETTLE_S)
        weights = [sum(pss_mib(pid) for pid in _processes_of(sandbox.id)) for sandbox in sandboxes]
    finally:
        for sandbox in sandboxes:
            sandbox.kill()
    return Measured(value=statistics.median(weights), spread=(min(weights), max(weights)))


def import_time(stage: Stage) -> Measured:
    """Milliseconds that all public names take on top of the two libraries they stand on."""
    product, bare = [], []
    for turn in range(6 * stage.rounds + 1):
        product.append(1e3 * _run_s([sys.executable, "-c", _IMPORT_ALL]))
        bare.append(1e3 * _run_s([sys.executable, "-c", "import httpx2, pydantic"]))
        if turn == 0:  # this one wrote the bytecode
            product.clear()
            bare.clear()
    size = max(1, len(product) // 5)
    blocks = [
        statistics.median(product[at : at + size]) - statistics.median(bare[at : at + size])
        for at in range(0, size * (len(product) // size), size)
    ]
    return Measured(
        value=statistics.median(product) - statistics.median(bare),
        spread=(min(blocks), max(blocks)),
        detail={"product_ms": round(statistics.median(product)), "bare_ms": round(statistics.median(bare))},
    )


def help_time(stage: Stage) -> Measured:
    command = [str(Path(sys.executable).with_name("cpuos")), "--help"]
    times = [_run_s(command) for _ in range(3 * stage.rounds + 1)][1:]
    detail = {"p90_s": round(percentile(times, 0.9), 3)}
    return Measured(value=statistics.median(times), spread=(min(times), max(times)), detail=detail)


def _run_s(command: list[str]) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    since = time.perf_counter()
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env=environment)
    status = process.wait()
    taken = time.perf_counter() - since
    if status != 0:
        raise RuntimeError(f"{' '.join(command)[:80]} ended with {status}")
    return taken


def _processes_of(sandbox_id: str) -> list[int]:
    """Host processes that name the sandbox, and their descendants: the sentry's stubs name nothing."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
            words = (entry / "cmdline").read_text()
        except OSError:
            continue
        parents[int(entry.name)] = int(text[text.rindex(")") + 2 :].split()[1])
        if sandbox_id in words:
            found.add(int(entry.name))
    size = 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found)
