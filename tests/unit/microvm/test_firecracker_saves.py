"""Saving machines of Firecracker and going on from them, as in `test_firecracker.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpuos.errors import PlatformError
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.microvm.runtime import MicrovmRuntime
from firecracker_description import problems_with
from firecracker_host import BOOT, ID, Host, driver_folder, find_requests, make_driver, read, traces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SAVE = ["PATCH /vm", "PUT /snapshot/create", "PATCH /vm"]
LOAD = ["GET /version", "PUT /logger", "PUT /metrics", "PUT /snapshot/load", "PATCH /vm"]


async def test_a_machine_is_saved_in_one_moment_and_goes_on(
    tmp_path: Path, driver: MicrovmRuntime, spec: SandboxSpec
) -> None:
    process = await driver.start(spec)
    await driver.checkpoint(ID, image=tmp_path / "image")
    asked = [(what, body) for what, body in find_requests(process.pid) if what != "GET /"][len(BOOT) :]
    assert [what for what, _ in asked] == SAVE
    assert [problem for what, body in asked for problem in problems_with(what, body)] == []
    assert [body["state"] for what, body in asked if what == "PATCH /vm"] == ["Paused", "Resumed"]
    assert read(tmp_path / "image" / "state") == "/snapshot/state"
    assert read(tmp_path / "image" / "ram") == "/snapshot/memory"
    assert os.stat(tmp_path / "image" / "layer.image").st_size == 4096
    assert [path.stat().st_size for path in sorted((spec.workdir / "saves").iterdir())] == [0, 0]


async def test_clones_map_one_memory_and_none_can_write_it(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec
) -> None:
    await driver.start(spec)
    image = tmp_path / "image"
    await driver.checkpoint(ID, image=image)
    await driver.destroy(ID)
    process = await driver.restore(spec, image=image)
    asked = [(what, body) for what, body in find_requests(process.pid) if what != "GET /"]
    assert [what for what, _ in asked] == LOAD
    assert [problem for what, body in asked for problem in problems_with(what, body)] == []
    assert dict(asked)["PUT /snapshot/load"]["mem_backend"] == {"backend_type": "File", "backend_path": "/image/memory"}
    inside = f"/proc/{process.pid}/root/image/memory"
    assert os.stat(inside).st_ino == os.stat(image / "ram").st_ino
    mounts = [line.split() for line in read(f"/proc/{process.pid}/mountinfo").splitlines()]
    options = {words[4]: words[5].split(",") for words in mounts}
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(options["/image/memory"])
    assert {"ro"} <= set(options["/drives/template"]) & set(options["/boot"])
    # Saving it again goes to another file than the one that it maps.
    await driver.checkpoint(ID, image=tmp_path / "second")
    assert read(image / "ram") == "/snapshot/memory"
    assert os.stat(tmp_path / "second" / "ram").st_ino != os.stat(image / "ram").st_ino


async def test_a_save_that_is_refused_leaves_no_image_and_it_runs_on(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec
) -> None:
    await driver.probe()
    host.misbehave('PUT /snapshot/create\t400 {"fault_message": "no room"}')
    process = await driver.start(spec)
    with pytest.raises(PlatformError, match="cannot save"):
        await driver.checkpoint(ID, image=tmp_path / "image")
    assert not (tmp_path / "image").exists()
    assert [path.stat().st_size for path in (spec.workdir / "saves").iterdir()] == [0, 0]
    assert [what for what, _ in find_requests(process.pid)][-3:] == SAVE
    assert await driver._prober._vmms[0].ask_state(driver_folder(spec) / "control", timeout_s=5) == "running"


@pytest.mark.parametrize("step", LOAD)
async def test_a_fault_at_each_step_of_a_restore_leaves_nothing(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec, step: str
) -> None:
    await driver.start(spec)
    image = tmp_path / "image"
    await driver.checkpoint(ID, image=image)
    await driver.destroy(ID)
    host.misbehave(f'{step}\t400 {{"fault_message": "it is of another"}}')
    with pytest.raises(PlatformError, match="it is of another"):
        await driver.restore(spec, image=image)
    assert traces(tmp_path) == []
    assert read(image / "ram") == "/snapshot/memory"


async def test_an_image_of_another_version_is_refused(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec
) -> None:
    await driver.start(spec)
    image = tmp_path / "image"
    await driver.checkpoint(ID, image=image)
    await driver.destroy(ID)
    newer = make_driver(tmp_path, Host(tmp_path / "newer", version="1.16.0", jailer_version="1.16.0"))
    with pytest.raises(PlatformError) as caught:
        await newer.restore(spec, image=image)
    assert caught.value.code == "snapshot_incompatible"
    await newer.close()
