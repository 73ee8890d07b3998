"""Copies of disks: of one moment, sparse or sharing their blocks, and never a frozen disk left behind."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos.errors import CapacityExceeded, NotFound, PlatformError
from cpuos.node.storage import DiskStore
from cpuos.node.storage.copying import copy_image, frozen
from cpuos.node.storage.folders import is_mounted
from cpuos.node.storage.loop import loops_below

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="needs root and loop devices"
)
A, B = "a" * 20, "b" * 20
FIFREEZE = 0xC0045877


@contextlib.contextmanager
def volume(folder: Path, *mkfs: str, size_mib: int) -> Iterator[Path]:
    """A file system of its own, mounted at the folder it gives."""
    image, mounted = folder / "volume.img", folder / "volume"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run([*mkfs, str(image)], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
    try:
        yield mounted
    finally:
        # The loop device of a disk on it goes by itself, a moment after its mount.
        deadline = time.monotonic() + 5
        while subprocess.run(["umount", str(mounted)]).returncode != 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
async def disks(tmp_path):
    store = DiskStore(tmp_path / "disks")
    yield store
    for sandbox_id in await store.leftovers():
        await store.remove(sandbox_id)
    assert not loops_below(tmp_path)


async def test_copy_of_a_mounted_disk_holds_what_was_written(disks, tmp_path):
    folder = await disks.create(A, size_mib=256)
    (folder / "workspace" / "notes").write_text("not synced")
    await disks.copy(A, to=tmp_path / "copy")
    (folder / "workspace" / "notes").write_text("later")
    assert (tmp_path / "copy").stat().st_blocks * 512 < 16 << 20
    other = await disks.create_from(B, image=tmp_path / "copy", size_mib=256)
    assert (other / "workspace" / "notes").read_text() == "not synced"
    assert (other / "workspace").stat().st_uid == 1000
    (other / "workspace" / "own").write_text("x")
    assert os.listdir(folder / "workspace") == ["notes"]


async def test_parked_disk_is_only_files_and_comes_back(disks, tmp_path):
    folder = await disks.create(A, size_mib=64)
    (folder / "workspace" / "kept").write_text("here")
    await disks.park(A)
    await disks.park(A)
    assert not is_mounted(folder)
    assert not loops_below(tmp_path)
    await disks.copy(A, to=tmp_path / "copy")
    await disks.unpark(A)
    assert (folder / "workspace" / "kept").read_text() == "here"
    other = await disks.create_from(B, image=tmp_path / "copy", size_mib=64)
    assert (other / "workspace" / "kept").read_text() == "here"


async def test_half_made_disk_of_a_copy_is_made_anew(disks, tmp_path):
    folder = await disks.create(A, size_mib=64)
    (folder / "workspace" / "kept").write_text("here")
    await disks.copy(A, to=tmp_path / "copy")
    disks.path(B).mkdir()
    (disks.path(B) / "image").write_bytes(b"half")
    other = await disks.create_from(B, image=tmp_path / "copy", size_mib=64)
    assert (other / "workspace" / "kept").read_text() == "here"


async def test_writers_go_on_after_a_copy_that_had_no_room(tmp_path):
    with volume(tmp_path, "mkfs.ext4", "-q", "-F", size_mib=96) as mounted:
        disks = DiskStore(mounted / "disks")
        folder = await disks.create(A, size_mib=64)
        try:
            (folder / "workspace" / "big").write_bytes(os.urandom(50 << 20))
            with pytest.raises(CapacityExceeded, match="cannot copy the disk") as caught:
                await disks.copy(A, to=mounted / "copy")
            assert "no room" in caught.value.why
            assert not (mounted / "copy").exists()
            async with asyncio.timeout(60):
                await asyncio.to_thread((folder / "workspace" / "more").write_text, "goes on")
        finally:
            await disks.remove(A)


async def test_disk_that_a_dead_node_left_frozen_is_thawed(disks):
    folder = await disks.create(A, size_mib=64)
    holder = os.open(folder / "workspace", os.O_RDONLY)
    fcntl.ioctl(holder, FIFREEZE, 0)
    os.close(holder)
    writing = asyncio.create_task(asyncio.to_thread((folder / "workspace" / "f").write_text, "x"))
    done, _ = await asyncio.wait([writing], timeout=0.3)
    assert not done
    await disks.thaw(A)
    await asyncio.wait_for(writing, 60)
    await disks.thaw(A)


async def test_frozen_ends_with_its_block(disks):
    folder = await disks.create(A, size_mib=64)
    with pytest.raises(RuntimeError), frozen(folder / "workspace"):
        raise RuntimeError
    (folder / "workspace" / "f").write_text("x")


async def test_no_disk_no_copy(disks, tmp_path):
    with pytest.raises(NotFound):
        await disks.copy(A, to=tmp_path / "copy")
    await disks.park(A)


def test_holes_stay_holes(tmp_path):
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(64 << 20)
        for offset in (0, 5 << 20, (64 << 20) - 5):
            file.seek(offset)
            file.write(b"data!")
    copy_image(source, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert (tmp_path / "target").stat().st_blocks * 512 <= 1 << 20
    with pytest.raises(FileExistsError):
        copy_image(source, tmp_path / "target")


@pytest.mark.skipif(shutil.which("mkfs.xfs") is None, reason="needs mkfs.xfs")
def test_blocks_are_shared_where_the_volume_can(tmp_path):
    with volume(tmp_path, "mkfs.xfs", "-q", size_mib=512) as mounted:
        (mounted / "source").write_bytes(os.urandom(100 << 20))
        os.sync()
        before = shutil.disk_usage(mounted).used
        for number in range(3):
            copy_image(mounted / "source", mounted / f"copy{number}")
        os.sync()
        assert shutil.disk_usage(mounted).used - before < 5 << 20
        assert (mounted / "copy2").read_bytes() == (mounted / "source").read_bytes()


async def test_copy_of_a_disk_that_a_guests_kernel_wrote_is_never_mounted(disks, tmp_path):
    folder = await disks.create(A, size_mib=64)
    await disks.copy(A, to=tmp_path / "clean.img")
    await disks.park(A)
    record = folder / "disk.json"
    record.write_text(record.read_text().replace('"host"', '"guest"'))
    await disks.copy(A, to=tmp_path / "copy.img")
    (tmp_path / "clean.json").unlink()  # unknown means so too
    for name in ("copy.img", "clean.img"):
        with pytest.raises(PlatformError, match="cannot mount"):
            await disks.create_from(B, image=tmp_path / name, size_mib=64)
        assert not is_mounted(disks.path(B))
        await disks.remove(B)
