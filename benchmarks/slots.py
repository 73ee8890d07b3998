"""The node's part of a sandbox's network: a slot from the pool with its policy in force, and a change of the policy."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.results import Measured, percentile
from benchmarks.stage import Stage
from cpuos.node.network.network import Network, NetworkConfig
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer

__all__ = ["policy_change", "slot_from_pool"]

_HIGHEST = -20
_BLOCKS = 5
_ALLOW = ["api.example.com", "*.example.org", "1.2.3.4", "5.6.0.0/16:443", "files.example.com:8443"]


def slot_from_pool(stage: Stage) -> Measured:
    """Milliseconds until a ready slot has its policy and is served by the workers."""
    return asyncio.run(_measure(8 * stage.rounds, changing=False))


def policy_change(stage: Stage) -> Measured:
    """Milliseconds until a new policy holds for everything new; cutting what is open comes behind it."""
    return asyncio.run(_measure(8 * stage.rounds, changing=True))


async def _measure(turns: int, *, changing: bool) -> Measured:
    times: list[float] = []
    cuts: list[float] = []
    async with _network() as network:
        for turn in range(turns):
            sandbox_id = f"{turn:020d}"
            while network.pool.ready < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            began = time.perf_counter()
            await network.take(sandbox_id, _policy(1))
            if not changing:
                times.append(time.perf_counter() - began)
            else:
                slot = network._slots[sandbox_id]
                began = time.perf_counter()
                learned = await network.workers.change(sandbox_id, _policy(2, *_ALLOW))
                await slot.apply(_policy(2, *_ALLOW), learned=learned)
                times.append(time.perf_counter() - began)
                began = time.perf_counter()
                await slot.cut()
                cuts.append(time.perf_counter() - began)
            await network.release(sandbox_id)
    milliseconds = [1000 * spent for spent in times]
    size = max(1, len(milliseconds) // _BLOCKS)
    blocks = [statistics.median(milliseconds[start : start + size]) for start in range(0, len(milliseconds), size)]
    detail = {"n": len(times), "p90": round(percentile(milliseconds, 0.9), 2), "least": round(min(milliseconds), 2)}
    if cuts:
        detail["cut_p50"] = round(1000 * statistics.median(cuts), 2)
    return Measured(value=statistics.median(milliseconds), spread=(min(blocks), max(blocks)), detail=detail)


@asynccontextmanager
async def _network() -> AsyncIterator[Network]:
    """Without an uplink: nothing outside of its own namespaces is touched."""
    os.setpriority(os.PRIO_PROCESS, 0, _HIGHEST)  # helpers inherit it
    with tempfile.TemporaryDirectory(prefix="cpuos-bench-") as name:
        folder = Path(name)
        os.chmod(name, 0o755)
        network = Network(
            NetworkConfig(
                folder=folder / "netns",
                instance_id="be9c40",
                block="auto",
                uplink="none",
                exceptions=(),
                dns_servers=("1.1.1.1",),
                pool=4,
                max_sandboxes=8,
                state_dir=_writable(folder / "state"),
                socket_path=_writable(folder / "run") / "network.sock",
            )
        )
        await network.start()
        await network.workers.wait_started()
        try:
            yield network
        finally:
            await network.close()
            await asyncio.to_thread(network.remove)


def _writable(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def _policy(version: int, *allow: str) -> EffectivePolicy:
    layer = PolicyLayer(origin="sandbox", policy=NetworkPolicy.model_validate({"allow": list(allow)} if allow else {}))
    return EffectivePolicy(version=version, layers=[layer])
