"""`python -m benchmarks.density idle|known [NUMBER]`: many sandboxes at once, and many more that are known and paused.

Apart from `benchmarks.run`: the whole numbers (200 idle ones, 1,000 known) take minutes and most of a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.results import percentile
from benchmarks.spent import Spent, sandboxes_pss_mib
from benchmarks.stage import put_first
from cpuos import Sandbox
from cpuos.client import Client
from cpuos.testing.instance import Instance
from cpuos.testing.memory import resident_mib

__all__ = ["idle", "known", "main"]

_SHAPE = {"cpu": 1, "memory": "256MiB", "disk": "64MiB", "timeout": "4h"}
_AT_ONCE = 8
_EXECS = 100
_CALLED = 30
_SHARE_PAUSED = 0.95
_SETTLE_S = 5.0
_WATCHED_S = 20.0
"""So long nobody asks for anything, and what is spent is looked at."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.density", description=__doc__)
    parser.add_argument("what", choices=["idle", "known"])
    parser.add_argument("number", nargs="?", type=int, help="sandboxes: 200 idle ones, 1,000 known")
    chosen = parser.parse_args(arguments)
    if os.geteuid() != 0:
        parser.error("it starts real sandboxes and needs root")
    measure: Callable[[Instance, int], dict[str, Any]] = idle if chosen.what == "idle" else known
    number = chosen.number or (200 if chosen.what == "idle" else 1000)
    before = os.getloadavg()[0]
    with _instance(number) as instance:
        try:
            told = measure(instance, number)
        except Exception:
            print(instance.logs(), file=sys.stderr)
            raise
    load = {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)}
    print(json.dumps({"what": chosen.what, "number": number, "load": load, **told}, indent=2))
    return 0


def _instance(number: int) -> Instance:
    """Overcommitted, as for sandboxes that mostly wait."""
    return Instance(
        runtime="gvisor",
        max_sandboxes=number + 8,
        cpu_overcommit=number,
        memory_overcommit=8,
        processes_overcommit=64,
        network_pool=16,
        pressure_idle_s=3600,
    )


def idle(instance: Instance, number: int) -> dict[str, Any]:
    """So many `python` sandboxes that do nothing: how soon they are there, what they take, how one of them answers."""
    client = instance.client()
    put_first(instance.settings.instance_id, processes=[os.getpid(), *instance.pids().values()])
    with Sandbox.create("python", client=client, **_SHAPE) as alone:
        calm = _execs(lambda: alone, _EXECS)
        free_before, own_before = _available_mib(), _own_mib(instance)
        begun, since = Spent.until_now(instance), time.perf_counter()
        made = _create(client, number, template="python")
        took_s = time.perf_counter() - since
        making = Spent.until_now(instance).since(begun)
        resting = _at_rest(instance)
        crowded = _execs(lambda: random.choice(made), _EXECS)
        pss = sandboxes_pss_mib(instance)
        taken, own = free_before - _available_mib(), _own_mib(instance)
        listed = _times(lambda: Sandbox.list(client=client), 10)
        _kill(made)
    return {
        "there_s": round(took_s, 1),
        "a_sandbox_s": round(took_s / number, 3),
        "making_cpu_ms_a_sandbox": making.shown(per=number),
        "idle_percent_of_a_cpu": resting,
        "exec_p95_ms": {"alone": _ms(percentile(calm, 0.95)), "among_them": _ms(percentile(crowded, 0.95))},
        "exec_p50_ms": {"alone": _ms(statistics.median(calm)), "among_them": _ms(statistics.median(crowded))},
        "p95_ratio": round(percentile(crowded, 0.95) / percentile(calm, 0.95), 2),
        "pss_mib": {"a_sandbox": round(pss / (number + 1), 1), "all": round(pss)},
        "memory_taken_mib": {"a_sandbox": round(taken / number, 1), "all": taken},
        "daemons_mib": {part: [round(own_before[part]), round(mib)] for part, mib in own.items()},
        "daemons_mib_when_they_are_gone": {part: round(mib) for part, mib in _own_mib(instance).items()},
        "list_p50_ms": _ms(statistics.median(listed)),
    }


def known(instance: Instance, number: int) -> dict[str, Any]:
    """So many that are known, 95 % of them paused: how soon any answers that is called, and all are listed."""
    client = instance.client()
    paused_count = round(number * _SHARE_PAUSED)
    paused: list[Sandbox] = []
    begun, since = Spent.until_now(instance), time.perf_counter()
    while len(paused) < paused_count:  # in batches: what is paused takes no room
        batch = _create(client, min(2 * _AT_ONCE, paused_count - len(paused)), template="base")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda one: one.pause(), batch))
        paused += batch
    running = _create(client, number - paused_count, template="base")
    made_s = time.perf_counter() - since
    making = Spent.until_now(instance).since(begun)
    taken = sandboxes_pss_mib(instance)
    resting = _at_rest(instance)
    put_first(instance.settings.instance_id, processes=[os.getpid(), *instance.pids().values()])  # not for minutes
    called = []
    for sandbox in random.sample(paused, min(_CALLED, paused_count)):
        called += _times(lambda one=sandbox: one.exec(["true"], check=True), 1)
        sandbox.pause()
    listed = _times(lambda: Sandbox.list(client=client), 10)
    disk = sum(path.lstat().st_blocks * 512 for path in instance.settings.node_state_dir.rglob("*") if path.is_file())
    own = _own_mib(instance)
    _kill([*running, *paused])
    return {
        "made_and_paused_s": round(made_s, 1),
        "making_cpu_ms_a_sandbox": making.shown(per=number),
        "called_p50_ms": _ms(statistics.median(called)),
        "called_p95_ms": _ms(percentile(called, 0.95)),
        "list_p50_ms": _ms(statistics.median(listed)),
        "idle_percent_of_a_cpu": resting,
        "pss_mib": {"all": round(taken), "running": number - paused_count},
        "daemons_mib": {part: round(mib) for part, mib in own.items()},
        "disk_mib": {"all": disk >> 20, "a_sandbox": round((disk >> 20) / number, 1)},
    }


def _at_rest(instance: Instance) -> dict[str, float]:
    """What is spent while nobody asks for anything, in percent of one processor."""
    time.sleep(_SETTLE_S)
    before, since = Spent.until_now(instance), time.perf_counter()
    time.sleep(_WATCHED_S)
    spent = Spent.until_now(instance).since(before)
    return spent.shown(per=10 * (time.perf_counter() - since))


def _create(client: Client, number: int, *, template: str) -> list[Sandbox]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda _: Sandbox.create(template, client=client, **_SHAPE), range(number)))


def _kill(sandboxes: Sequence[Sandbox]) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda one: one.kill(), sandboxes))


def _execs(choose: Callable[[], Sandbox], count: int) -> list[float]:
    choose().exec(["true"], check=True)
    return _times(lambda: choose().exec(["true"], check=True), count)


def _times(work: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        since = time.perf_counter()
        work()
        times.append(time.perf_counter() - since)
    return times


def _own_mib(instance: Instance) -> dict[str, float]:
    """Memory of each daemon that is its own."""
    return {part: resident_mib(pid) for part, pid in instance.pids().items()}


def _available_mib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable"))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


if __name__ == "__main__":
    sys.exit(main())
