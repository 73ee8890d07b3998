"""Creates that take a ready sandbox, until the result of their first command."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

from benchmarks.lifecycle import ASK_COLD, ASK_WARM, WARM_SHAPE, first_sum, save_warm
from benchmarks.results import Measured, block_ratios, percentile
from benchmarks.stage import Stage, put_first
from benchmarks.starts import bare_starts
from cpuos import Sandbox
from cpuos.client import Client
from cpuos.services.health import ask
from cpuos.testing.instance import Instance
from cpuos.types.sandbox import StartedFrom

__all__ = ["against_bare", "at_once", "pandas", "to_exec", "to_exec_slowest"]

_SHAPE = {"cpu": 1, "memory": "256MiB", "disk": "256MiB"}
_BATCH = 25
_AT_ONCE = 50
_STOCK_S = 300.0
_QUIET_S = 0.5
_HELD_S = 3.0
"""Between two creates of a batch nothing is made ready."""


def to_exec(stage: Stage) -> Measured:
    """One after the other; between batches the pool fills again."""
    times = _taken(stage)
    return _measured(times, statistics.median(times))


def to_exec_slowest(stage: Stage) -> Measured:
    """The same: of a hundred, the one that took longest."""
    times = _taken(stage)
    return _measured(times, percentile(times, 0.99))


def against_bare(stage: Stage) -> Measured:
    """The same in turns with `runsc run -detach` and `runsc exec`, whose disk and namespaces are there before."""
    product, bare = [], []
    with _pool(_BATCH) as pool, bare_starts(_folder(stage, "bare"), exec_too=True) as run_bare:
        for _ in range(max(1, stage.rounds // 2)):
            pool.wait_full()
            with ExitStack() as made:
                for _ in range(_BATCH):
                    bare.append(run_bare())
                    product.append(pool.create_and_exec(made))
    return Measured(
        value=statistics.median(bare) / statistics.median(product),
        spread=block_ratios(bare, product),
        detail={"n": len(product), "ready_ms": _ms(product), "bare_ms": _ms(bare)},
    )


def at_once(stage: Stage) -> Measured:
    """Fifty callers at the same moment, with fifty ready: the slowest of a hundred."""
    times: list[float] = []
    with _pool(_AT_ONCE) as pool, ThreadPoolExecutor(_AT_ONCE) as callers:
        for _ in range(max(2, stage.rounds // 2)):
            pool.wait_full()
            begin = Barrier(_AT_ONCE)
            with ExitStack() as made:

                def call(_: int, begin: Barrier = begin, made: ExitStack = made) -> float:
                    begin.wait()
                    return pool.create_and_exec(made)

                times += callers.map(call, range(_AT_ONCE))
    return _measured([1e3 * one for one in times], 1e3 * percentile(times, 0.99))


def pandas(stage: Stage) -> Measured:
    """A sum by a Python with pandas imported, in a sandbox of a snapshot that is ready, against a cold start."""
    warm, cold = [], []
    with _pool(1) as pool:
        snapshot = save_warm(pool.client)
        first_sum(pool.client, ASK_WARM, snapshot=snapshot)  # from now on it is asked for
        for _ in range(max(3, stage.rounds)):
            pool.wait_full(snapshot=snapshot.id)
            warm.append(first_sum(pool.client, ASK_WARM, snapshot=snapshot))
            cold.append(first_sum(pool.client, ASK_COLD, **WARM_SHAPE))
    return Measured(
        value=statistics.median(cold) / statistics.median(warm),
        spread=block_ratios(cold, warm),
        detail={"n": len(warm), "warm_ms": _ms(warm), "cold_ms": _ms(cold)},
    )


@dataclass(frozen=True, kw_only=True)
class _Pool:
    instance: Instance
    client: Client
    size: int

    def wait_full(self, *, snapshot: str | None = None) -> None:
        until = time.monotonic() + _STOCK_S
        while True:
            _, pool = ask(self.instance.settings.node_socket, "/v1/pool", timeout_s=30)
            ready = sum(one["snapshot"] == snapshot for one in pool["ready"])
            if ready >= self.size:
                break
            if time.monotonic() > until:
                raise RuntimeError(f"the pool has {ready} of {self.size} after {_STOCK_S:g} s")
            time.sleep(0.1)
        time.sleep(_QUIET_S)

    def create_and_exec(self, made: ExitStack) -> float:
        """Seconds; the sandbox is ended with `made`."""
        since = time.perf_counter()
        sandbox = Sandbox.create(client=self.client, **_SHAPE)
        sandbox.exec(["true"], check=True)
        spent = time.perf_counter() - since
        made.callback(sandbox.kill)
        if sandbox.started_from != StartedFrom.POOL:
            raise RuntimeError(f"sandbox {sandbox.id} was not ready: {sandbox.started_from}")
        return spent


@contextmanager
def _pool(size: int) -> Iterator[_Pool]:
    """An instance that keeps so many ready, and what it promises of CPUs is no limit."""
    settings = {
        "pool_memory_mib": 8192,
        "pool_keep": [f"python@1x256x256={size}"],
        "pool_settle_s": _HELD_S,
        "cpu_overcommit": 200,
    }
    with Instance(runtime="gvisor", **settings) as instance:
        put_first(instance.settings.instance_id, processes=[os.getpid(), *instance.pids().values()])
        pool = _Pool(instance=instance, client=instance.client(), size=size)
        pool.wait_full()
        with ExitStack() as warm:  # connections and imports
            pool.create_and_exec(warm)
        yield pool


def _taken(stage: Stage) -> list[float]:
    """Milliseconds of each; measured once a run."""
    known: list[float] = stage.kept.setdefault("taken from the pool", [])
    if not known:
        with _pool(_BATCH) as pool:
            while len(known) < 60 * stage.rounds:
                pool.wait_full()
                with ExitStack() as made:
                    known += [1e3 * pool.create_and_exec(made) for _ in range(_BATCH)]
    return known


def _folder(stage: Stage, name: str) -> Path:
    return Path(tempfile.mkdtemp(dir=stage.folder, prefix=name))


def _ms(times: Sequence[float]) -> float:
    return round(1e3 * statistics.median(times), 1)


def _measured(milliseconds: Sequence[float], value: float) -> Measured:
    detail = {"n": len(milliseconds)}
    for share in (0.5, 0.9, 0.99):
        detail[f"p{100 * share:g}"] = round(percentile(milliseconds, share), 1)
    return Measured(value=value, spread=(min(milliseconds), max(milliseconds)), detail=detail)
