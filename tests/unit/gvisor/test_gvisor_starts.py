"""Many starts at once wait for each other, so that each has its time; one that fails gives its turn to the next."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cpuos.errors import PlatformError
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.gvisor import GvisorRuntime


def spec(folder: Path, number: int) -> SandboxSpec:
    workdir = folder / f"{number:020d}"
    workdir.mkdir()
    return SandboxSpec(
        id=workdir.name,
        generation=1,
        hostname="box",
        cpu=1,
        memory_mib=128,
        disk_mib=64,
        max_processes=64,
        template_image=folder / "root.erofs",
        workdir=workdir,
        disk=folder / "disk",
        netns=folder / "netns",
        agent=folder / "agent",
        node_public_key=b"k" * 32,
    )


async def test_starts_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    host = RuntimeHost(
        instance_id="unit", data_dir=tmp_path, state_dir=tmp_path, run_dir=tmp_path / "run", on_oom=lambda *_: None
    )
    runtime = GvisorRuntime(host)
    at_work, most, ended = 0, 0, 0
    gate = asyncio.Event()

    async def run(*arguments: object, **options: object) -> int:
        nonlocal at_work, most, ended
        at_work += 1
        most = max(most, at_work)
        await gate.wait()
        await asyncio.sleep(0)
        at_work -= 1
        ended += 1
        return 1

    async def nothing(*arguments: object) -> None:
        return None

    monkeypatch.setattr(runtime._runsc, "launch", run)
    monkeypatch.setattr(runtime._groups, "prepare", lambda: None)
    monkeypatch.setattr(runtime._worker, "start", nothing)
    monkeypatch.setattr(runtime, "destroy", nothing)
    starts = [asyncio.create_task(runtime.start(spec(tmp_path, number))) for number in range(20)]
    while at_work < 6:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert at_work == 6, "two for each processor"
    gate.set()
    answers = await asyncio.gather(*starts, return_exceptions=True)
    assert all(isinstance(answer, PlatformError) for answer in answers)
    assert (ended, most) == (20, 6)
