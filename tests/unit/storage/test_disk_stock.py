"""The stock of disks: filled in the background, bounded in number and bytes; a crash leaves nothing of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cpuos.node.storage import DiskStore, stock
from cpuos.node.storage.folders import is_mounted, remove_disk
from cpuos.node.storage.image import make_image
from cpuos.node.storage.loop import loops_below
from cpuos.node.storage.stock import DEPTH, KINDS, DiskStock
from cpuos.testing.waiting import until
from cpuos.types.sandbox import SandboxCreate

ID = "a" * 20
needs_loops = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="needs root and loop devices"
)


class Maker:
    """Stands in for mkfs and mount: makes folders with small files, and does what a test plans."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.size = 4096
        self.problem: OSError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, folder: Path, *, size_mib: int, identity: str) -> None:
        folder.mkdir()  # noqa: ASYNC240
        (folder / "image").write_bytes(b"x" * self.size)
        await self.gate.wait()
        if self.problem is not None:
            raise self.problem
        self.made.append(size_mib)


@asynccontextmanager
async def filled(folder: Path, maker: Maker, *, size_mib: int = 64) -> AsyncIterator[DiskStock]:
    made = DiskStock(folder, make=maker, remove=shutil.rmtree, settle_s=0, retry_s=0)
    made.start(size_mib=size_mib)
    try:
        yield made
    finally:
        await made.close()
    assert os.listdir(folder) == []


def sizes(made: DiskStock) -> list[int]:
    """Of what could be taken now."""
    return sorted(disk.size_mib for disks in made._ready.values() for disk in disks)


def names(made: DiskStock) -> set[str]:
    return {disk.folder.name for disks in made._ready.values() for disk in disks}


async def test_what_is_taken_is_made_again(tmp_path):
    async with filled(tmp_path, Maker()) as made:
        await until(lambda: len(sizes(made)) == DEPTH)
        taken = [made.take(64) for _ in range(DEPTH)]
        assert len({one.identity for one in taken}) == DEPTH
        assert made.take(64) is None, "the stock is empty"
        for one in taken:
            shutil.rmtree(one.folder)  # as its taker moves it away
        await until(lambda: len(sizes(made)) == DEPTH)
        assert made.take(64).identity not in {one.identity for one in taken}


async def test_sizes_asked_for_last_are_kept(tmp_path):
    asked = [64 + number for number in range(KINDS + 1)]
    async with filled(tmp_path, Maker()) as made:
        for size_mib in asked:
            assert made.take(size_mib) is None or size_mib == 64
            await until(lambda size_mib=size_mib: sizes(made).count(size_mib) == DEPTH)
        assert sizes(made) == sorted(asked[1:] * DEPTH)
        await until(lambda: set(os.listdir(tmp_path)) == names(made))


async def test_a_size_that_is_dropped_while_it_is_made_is_not_kept(tmp_path):
    maker = Maker()
    maker.gate.clear()
    async with filled(tmp_path, maker) as made:
        await until(lambda: len(os.listdir(tmp_path)) == 1)
        for number in range(1, KINDS + 1):
            made.take(64 + number)
        maker.gate.set()
        await until(lambda: sizes(made) == sorted([64 + number for number in range(1, KINDS + 1)] * DEPTH))
        await until(lambda: set(os.listdir(tmp_path)) == names(made))
        assert maker.made[0] == 64


async def test_images_that_hold_much_are_not_stocked(tmp_path, monkeypatch):
    monkeypatch.setattr(stock, "MAX_IMAGE_BYTES", 64 << 10)
    maker = Maker()
    maker.size = 256 << 10
    async with filled(tmp_path, maker) as made:
        await until(lambda: maker.made == [64])
        maker.size = 4096
        made.take(65)
        await until(lambda: sizes(made) == [65] * DEPTH)
        made.take(64)
        shutil.rmtree(made.take(65).folder)
        await until(lambda: sizes(made) == [65] * DEPTH)
        assert maker.made.count(64) == 1


async def test_a_full_volume_is_left_alone(tmp_path, monkeypatch):
    free = os.statvfs(tmp_path)
    monkeypatch.setattr(stock, "LEAVE_FREE_BYTES", free.f_blocks * free.f_frsize)
    maker = Maker()
    async with filled(tmp_path, maker) as made:
        await until(lambda: not made._wanted.is_set())
        for _ in range(50):
            await asyncio.sleep(0)
        assert (maker.made, os.listdir(tmp_path)) == ([], [])


async def test_a_fault_leaves_nothing_and_the_stock_goes_on(tmp_path):
    maker = Maker()
    maker.problem = OSError(errno.ENOSPC, "no space left on device")
    async with filled(tmp_path, maker) as made:
        await until(lambda: not made._wanted.is_set())
        assert made.take(64) is None
        maker.problem = None
        await until(lambda: len(sizes(made)) == DEPTH)
        assert set(os.listdir(tmp_path)) == names(made)


async def test_what_a_killed_daemon_left_is_removed(tmp_path):
    for name in ("64.1", "64.2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "image").write_bytes(b"from before a power cut")
    async with filled(tmp_path, Maker()) as made:
        assert made.take(64) is None
        await until(lambda: len(sizes(made)) == DEPTH)
        assert set(os.listdir(tmp_path)) == names(made)
        assert not {"64.1", "64.2"} & names(made)


async def test_what_cannot_be_removed_does_not_stop_it(tmp_path):
    (tmp_path / "64.1").mkdir()

    def remove(folder: Path) -> None:
        if folder.name == "64.1":
            raise OSError(errno.EBUSY, "still mounted")
        shutil.rmtree(folder)

    made = DiskStock(tmp_path, make=Maker(), remove=remove, settle_s=0, retry_s=0)
    made.start(size_mib=64)
    await until(lambda: len(sizes(made)) == DEPTH)
    await made.close()
    assert os.listdir(tmp_path) == ["64.1"]


async def test_closing_in_the_middle_ends_mkfs_and_leaves_nothing(tmp_path, monkeypatch):
    program = tmp_path / "slow"
    program.write_text("#!/bin/sh\necho $$ >$0.pid\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr("cpuos.node.storage.image.MKFS", str(program))
    folder = tmp_path / "stock"
    made = DiskStock(folder, settle_s=0)
    made.start(size_mib=64)
    pid = program.with_suffix(".pid")
    await until(lambda: pid.exists() and pid.read_text().endswith("\n"))
    await made.close()
    assert os.listdir(folder) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_it_is_made_while_the_machine_is_idle(tmp_path, monkeypatch):
    program = tmp_path / "asks"
    program.write_text('#!/bin/sh\nchrt --pid $$ >"$0.told"\nionice -p $$ >>"$0.told"\n')
    program.chmod(0o700)
    monkeypatch.setattr("cpuos.node.storage.image.MKFS", str(program))
    await make_image(tmp_path / "image", size_mib=64, identity="0", idly=True)
    told = (tmp_path / "asks.told").read_text()
    assert "SCHED_IDLE" in told
    assert told.endswith("idle\n")


@needs_loops
async def test_a_disk_from_the_stock_is_like_any_other(tmp_path):
    size_mib = SandboxCreate().disk_mib
    disks = DiskStore(tmp_path / "disks", stock=tmp_path / "stock")
    direct = DiskStore(tmp_path / "direct")
    disks.start()
    try:
        await until(lambda: len(sizes(disks._stock)) == DEPTH)
        before = {name.split(".")[1] for name in names(disks._stock)}
        folder = await disks.create(ID, size_mib=size_mib)
        other = await direct.create(ID, size_mib=size_mib)
        record, expected = (json.loads((place / "disk.json").read_text()) for place in (folder, other))
        assert record["uuid"] in before
        differing = {"uuid", "created_at"}
        assert {key: record[key] for key in record.keys() - differing} == {
            key: expected[key] for key in expected.keys() - differing
        }
        assert _uuid_of(folder / "image") == record["uuid"]
        assert mounts_of(folder / "workspace") == mounts_of(other / "workspace")
        for place in (folder, other):
            assert place.stat().st_mode & 0o777 == 0o700
            facts = os.stat(place / "workspace")
            assert (facts.st_uid, facts.st_gid, os.listdir(place / "workspace")) == (1000, 1000, [])
        assert os.statvfs(folder / "workspace").f_blocks == os.statvfs(other / "workspace").f_blocks
        assert (folder / "image").stat().st_mode == (other / "image").stat().st_mode
        assert await disks.leftovers() == [ID], "the stock is nobody's disk"
        assert await disks.create(ID, size_mib=size_mib) == folder
        await disks.detach(ID)
        await disks.attach(ID)
        assert is_mounted(folder)
    finally:
        await disks.remove(ID)
        await direct.remove(ID)
        await disks.close()
    assert not loops_below(tmp_path)
    assert os.listdir(tmp_path / "stock") == []


@needs_loops
async def test_more_creates_than_the_stock_holds_and_one_whose_image_is_gone(tmp_path):
    size_mib = SandboxCreate().disk_mib
    disks = DiskStore(tmp_path / "disks", stock=tmp_path / "stock")
    disks.start()
    ids = [letter * 20 for letter in "abcd"]
    try:
        await until(lambda: len(sizes(disks._stock)) == DEPTH)
        remove_disk(next((tmp_path / "stock").iterdir()))
        await asyncio.gather(*(disks.create(sandbox_id, size_mib=size_mib) for sandbox_id in ids))
        made = {json.loads((disks.path(sandbox_id) / "disk.json").read_text())["uuid"] for sandbox_id in ids}
        assert len(made) == len(ids)
        assert len(loops_below(tmp_path)) == len(ids)
    finally:
        for sandbox_id in ids:
            await disks.remove(sandbox_id)
        await disks.close()


@needs_loops
async def test_mounts_of_a_killed_daemon_are_removed(tmp_path):
    killed, later = (DiskStore(tmp_path / "disks", stock=tmp_path / "stock") for _ in range(2))
    killed.start()
    await until(lambda: len(sizes(killed._stock)) == DEPTH)
    killed._stock._keeper.cancel()
    old = names(killed._stock)
    later.start()
    try:
        await until(lambda: len(sizes(later._stock)) == DEPTH)
        assert not names(later._stock) & old
        assert {image.parent.name for image in loops_below(tmp_path / "stock").values()} == names(later._stock)
    finally:
        await later.close()
    assert not loops_below(tmp_path)


@needs_loops
async def test_a_half_made_disk_is_not_replaced_by_one_of_the_stock(tmp_path):
    disks = DiskStore(tmp_path / "disks", stock=tmp_path / "stock")
    disks.start()
    try:
        await until(lambda: len(sizes(disks._stock)) == DEPTH)
        (disks.path(ID) / "overlay").mkdir(parents=True)
        (disks.path(ID) / "image").write_bytes(b"half")
        folder = await disks.create(ID, size_mib=SandboxCreate().disk_mib)
        assert is_mounted(folder)
        assert len(sizes(disks._stock)) == DEPTH
    finally:
        await disks.remove(ID)
        await disks.close()


def mounts_of(path: Path) -> set[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == str(path):
            return set(fields[5].split(",")) | set(fields[-1].split(","))
    raise AssertionError(f"{path} is not mounted")


def _uuid_of(image: Path) -> str:
    told = subprocess.run(["blkid", "-o", "value", "-s", "UUID", image], check=True, capture_output=True, text=True)
    return told.stdout.strip()
