"""Images of gVisor sandboxes: another sandbox goes on from one, and a save that fails changes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos.errors import CapacityExceeded, CpuosError, NotFound, PlatformError
from cpuos.settings import RUNSC_VERSION

pytestmark = pytest.mark.gvisor

CHANGES = "echo kept > /etc/kept; rm /etc/issue; head -c 8M /dev/urandom > /opt/f; echo w > /workspace/w; sync"
LOOK = "cat /etc/kept; ls /etc/issue 2>&1; sha256sum < /opt/f; hostname; cat /sys/fs/cgroup/*/pids.max"


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_another_sandbox_goes_on_from_an_image(machine, tmp_path):
    async with machine.guest(1) as first:
        await first.run(CHANGES)
        seen = (await first.run(LOOK)).splitlines()
        await machine.runtime.checkpoint(first.id, image=tmp_path / "image")
        assert (await first.run(LOOK)).splitlines() == seen, "it runs on"
        spec = await machine.prepare(2)
        try:
            await machine.runtime.restore(spec, image=tmp_path / "image")
            other = type(first)(machine=machine, spec=spec, process=None)
            assert (await other.run(LOOK)).splitlines() == [*seen[:3], "box-2", seen[4]]
            assert (await other.try_run("cat /workspace/w"))[0] != 0, "its disk is its own"
            assert (await machine.runtime.stats(spec.id)).processes >= 1
            assert "10.0.0.2" in await other.run("cat /proc/net/fib_trie /proc/net/route 2>/dev/null; ip -4 addr")
        finally:
            await machine.take_away(spec.id)


async def test_another_sandbox_begins_with_a_saved_root(machine, tmp_path):
    async with machine.guest(1) as first:
        await first.run(CHANGES)
        seen = (await first.run(LOOK)).splitlines()
        await machine.runtime.save_root(first.id, image=tmp_path / "root")
        spec = await machine.prepare(2)
        try:
            await machine.runtime.start(spec, root=tmp_path / "root")
            other = type(first)(machine=machine, spec=spec, process=None)
            assert (await other.run(LOOK)).splitlines() == [*seen[:3], "box-2", seen[4]]
        finally:
            await machine.take_away(spec.id)


async def test_an_image_of_an_older_version_is_taken_up_by_that(machine, monkeypatch, tmp_path):
    """It is kept beside the present one, and what goes on under it is saved as of it."""
    runtime, programs = machine.runtime, tmp_path / "bin"
    programs.mkdir()
    for name in (RUNSC_VERSION, "v-before"):
        shutil.copytree(runtime._programs / RUNSC_VERSION, programs / name)
    monkeypatch.setattr(runtime, "_programs", programs)
    assert (runtime.takes("v-before"), runtime.takes(RUNSC_VERSION), runtime.takes("v-gone")) == (True, True, False)
    async with machine.guest(1) as first:
        await first.run(CHANGES)
        seen = (await first.run(LOOK)).splitlines()
        await runtime.checkpoint(first.id, image=tmp_path / "image")
        assert runtime.version_of(first.id) == (tmp_path / "image" / "runsc-version").read_text() == RUNSC_VERSION
    (tmp_path / "image" / "runsc-version").write_text("v-before")
    spec = await machine.prepare(2)
    try:
        process = await runtime.restore(spec, image=tmp_path / "image")
        assert os.readlink(f"/proc/{process.pid}/exe").startswith(str(programs / "v-before"))
        other = type(first)(machine=machine, spec=spec, process=process)
        assert (await other.run(LOOK)).splitlines()[:3] == seen[:3]
        await runtime.close()  # as a daemon that ends, and another one
        assert await runtime.adopt(spec, process)
        assert runtime.version_of(spec.id) == "v-before"
        await runtime.checkpoint(spec.id, image=tmp_path / "again")
        assert (tmp_path / "again" / "runsc-version").read_text() == "v-before"
    finally:
        await machine.take_away(spec.id)
    (tmp_path / "image" / "runsc-version").write_text("v-gone")
    spec = await machine.prepare(3)
    try:
        with pytest.raises(CpuosError):
            await runtime.restore(spec, image=tmp_path / "image")
    finally:
        await machine.take_away(spec.id)


@pytest.mark.parametrize("verb", ["checkpoint", "save_root"])
async def test_a_save_without_room_changes_nothing(machine, small_volume, tmp_path, verb):
    async with machine.guest() as guest:
        await guest.run(CHANGES)
        seen = await guest.run(LOOK)
        with pytest.raises(CapacityExceeded):
            await getattr(machine.runtime, verb)(guest.id, image=small_volume / "image")
        assert os.listdir(small_volume) == []
        assert await guest.run(LOOK) == seen
        await getattr(machine.runtime, verb)(guest.id, image=tmp_path / "image")


async def test_an_image_that_does_not_fit_starts_nothing(machine, tmp_path):
    async with machine.guest(1) as first:
        await machine.runtime.checkpoint(first.id, image=tmp_path / "image")
        spec = await machine.prepare(2, max_processes=101)
        try:
            with pytest.raises(PlatformError, match="cannot start sandbox"):
                await machine.runtime.restore(spec, image=tmp_path / "image")
            assert spec.id not in await machine.runtime.leftovers()
        finally:
            await machine.take_away(spec.id)


async def test_what_an_image_takes_is_told_before(machine, tmp_path):
    async with machine.guest() as guest:
        await guest.run(CHANGES)
        told = await machine.runtime.image_bytes(guest.id)
        assert told >= 2 * 8 << 20
        await machine.runtime.checkpoint(guest.id, image=tmp_path / "image")
        await machine.runtime.save_root(guest.id, image=tmp_path / "root")
        taken = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("[ir][mo]*/*"))
        assert taken <= told
    with pytest.raises(NotFound):
        await machine.runtime.checkpoint(guest.id, image=tmp_path / "none")
    assert not (tmp_path / "none").exists()
