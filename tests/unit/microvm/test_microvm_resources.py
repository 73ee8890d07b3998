"""What the node makes for a guest with a kernel of its own: groups with limits, and disks that nobody mounts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cpuos.errors import PlatformError
from cpuos.node.storage import DiskStore
from cpuos.node.storage.image import read_identity
from cpuos.runtimes.limits import ControlGroups

A, B = "a" * 20, "b" * 20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def told(*words: str | Path) -> str:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=True).stdout


def test_groups_of_version_2_have_all_limits(tmp_path: Path) -> None:
    """A folder takes what is written as the kernel would; what it would make by itself is not looked at."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    made = ControlGroups("7e57bb", root=tmp_path).create(A, memory_mib=256, cpu=2, processes=40)
    assert made == [tmp_path / "cpuos-7e57bb" / A]
    (group,) = made
    found = {path.name: path.read_text() for path in group.iterdir()}
    assert found == {
        "memory.max": str(256 << 20),
        "cpu.max": "200000 100000",
        "cpu.weight": "200",
        "pids.max": "40",
    }
    for above in (tmp_path, group.parent):
        assert (above / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_groups_of_version_1_have_them_in_each_hierarchy(tmp_path: Path) -> None:
    for name in ("cpu", "cpuset", "memory", "pids"):
        (tmp_path / name).mkdir()
    for folder in (tmp_path / "cpuset", tmp_path / "cpuset" / "cpuos-7e57bb", tmp_path / "cpuset" / "cpuos-7e57bb" / A):
        folder.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            (folder / name).write_text("0-1" if folder == tmp_path / "cpuset" else "\n")
    made = ControlGroups("7e57bb", root=tmp_path).create(A, memory_mib=256, cpu=1, processes=40)
    assert [group.relative_to(tmp_path).parts[0] for group in made] == ["cpu", "cpuset", "memory", "pids"]
    text = {path.name: path.read_text() for group in made for path in group.iterdir()}
    assert text["memory.limit_in_bytes"] == str(256 << 20)
    assert (text["cpu.cfs_quota_us"], text["cpu.cfs_period_us"], text["pids.max"]) == ("100000", "100000", "40")
    assert text["cpuset.cpus"] == "0-1", "without one no process may enter"


@needs_root
async def test_a_disk_that_is_handed_over_is_two_images_and_no_mount(tmp_path: Path) -> None:
    disks = DiskStore(tmp_path / "disks")
    folder = await disks.hand_over(A, size_mib=64)
    try:
        record = json.loads((folder / "disk.json").read_text())
        assert record["written_by"] == "guest"
        assert read_identity(folder / "image") != read_identity(folder / "root.image")
        for name, owner in (("image", "1000"), ("root.image", "0")):
            assert "clean" in told("e2fsck", "-n", folder / name)
            assert f"User:{owner:>6}" in told("debugfs", "-R", "stat <2>", folder / name)
        assert str(tmp_path) not in told("cat", "/proc/self/mountinfo")
        assert await disks.hand_over(A, size_mib=64) == folder
        assert json.loads((folder / "disk.json").read_text()) == record
        assert await disks.used_bytes(A) > 0
        assert (await disks.room(A)).free_bytes > 1 << 40, "nobody here knows what is free in it"
        with pytest.raises(PlatformError, match="never mounts"):
            await disks.attach(A)
        await disks.park(A)
        assert await disks.unpark(A) == folder
        assert A in await disks.leftovers()
    finally:
        await disks.remove(A)
    assert await disks.leftovers() == []


@needs_root
async def test_files_go_from_gvisor_to_a_machine_and_not_back(tmp_path: Path) -> None:
    disks = DiskStore(tmp_path / "disks")
    try:
        folder = await disks.create(A, size_mib=64)
        (folder / "workspace" / "kept").write_text("words")
        await disks.copy(A, to=tmp_path / "copy")
        machine = await disks.hand_over(B, size_mib=64, image=tmp_path / "copy")
        assert told("debugfs", "-R", "cat /kept", machine / "image") == "words"
        assert json.loads((machine / "disk.json").read_text())["written_by"] == "guest"
        await disks.copy(B, to=tmp_path / "back")
        assert json.loads((tmp_path / "back.json").read_text())["written_by"] == "guest"
        await disks.remove(A)
        with pytest.raises(PlatformError, match="never mounts"):
            await disks.create_from(A, image=tmp_path / "back", size_mib=64)
    finally:
        for sandbox_id in (A, B):
            await disks.remove(sandbox_id)
