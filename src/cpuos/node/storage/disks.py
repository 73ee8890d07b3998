"""One folder a sandbox: the ext4 image of its /workspace, and the place of its root's writable layer.

    disks/<id>/disk.json     what it is, and who wrote its blocks
    disks/<id>/image         sparse ext4 image, mounted on
    disks/<id>/workspace/    (root of that file system, owner 1000:1000)
    disks/<id>/overlay/      root 0700: gVisor keeps its unlinked filestore here
    disks/<id>/root.image    instead, where the guest has a kernel of its own: nothing is mounted then (handed.py)

A new disk is taken from the stock, where that has one of its size (stock.py).
Workspace and root layer each hold the sandbox's disk size. They do not share one file system on purpose: see
docs/adr/0006-workspace-image-and-root-layer.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import uuid
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path

from cpuos.errors import CapacityExceeded, CpuosError, NotFound, PlatformError, SetupRequired
from cpuos.node.resources import DiskRoom
from cpuos.node.steps import run_whole
from cpuos.node.storage.copying import copy_image, frozen, sync_all, thaw
from cpuos.node.storage.digest import digest_of, mark_of
from cpuos.node.storage.folders import (
    is_mounted,
    mount_disk,
    prepare_folder,
    remove_disk,
    unmount_disk,
    wait_released,
)
from cpuos.node.storage.geometry import geometry_for
from cpuos.node.storage.handed import ROOT_IMAGE, make_handed, sync_handed, taken_bytes
from cpuos.node.storage.image import MKFS, hold_blocks, make_image, read_identity
from cpuos.node.storage.loop import loops_below
from cpuos.node.storage.room import promised
from cpuos.node.storage.stock import DiskStock, Stocked
from cpuos.types.sandbox import SandboxCreate

__all__ = ["DiskStore"]

_FORMAT = 1


class DiskStore:
    """Makes, mounts, unmounts and removes the disks below one folder (root, 0700)."""

    def __init__(self, folder: Path, *, stock: Path | None = None, hold: bool = False) -> None:
        """`stock`: a folder on the same volume for disks made in advance, once `start` was called. `hold`: whoever has
        a disk has all its blocks."""
        self._folder = folder
        self._hold = hold
        self._stock = DiskStock(stock) if stock is not None else None

    def start(self) -> None:
        """Begin to keep a stock of disks, first of the size that a sandbox has unless another is asked for."""
        if self._stock is not None:
            self._stock.start(size_mib=SandboxCreate().disk_mib)

    async def close(self) -> None:
        """Give the stock up. Disks stay as they are."""
        if self._stock is not None:
            await self._stock.close()

    @staticmethod
    def footprint_mib(disk_mib: int) -> int:
        """What a disk of this size can take on the data volume at most: its image and its root layer."""
        return geometry_for(disk_mib).image_mib + disk_mib

    def path(self, sandbox_id: str) -> Path:
        return self._folder / sandbox_id

    async def create(self, sandbox_id: str, *, size_mib: int) -> Path:
        """Make the disk and mount it. A half-made one is made anew; one that is there is only mounted."""
        folder = self.path(sandbox_id)
        if (folder / "disk.json").exists():
            return await self.attach(sandbox_id)
        stocked = self._stock.take(size_mib) if self._stock is not None and not folder.exists() else None
        try:
            if stocked is not None and self._place(sandbox_id, stocked):
                if self._hold:
                    await asyncio.to_thread(hold_blocks, folder / "image")
                return folder
            await self._make(sandbox_id, size_mib=size_mib)
        except FileNotFoundError as problem:
            raise SetupRequired(
                f"cannot create the disk of sandbox {sandbox_id}", f"{MKFS} is not there", hint="cpuos doctor"
            ) from problem
        except OSError as problem:
            raise _failure("create", sandbox_id, problem) from problem
        return await self.attach(sandbox_id)

    async def create_from(self, sandbox_id: str, *, image: Path, size_mib: int) -> Path:
        """Make the disk from a copy of another one of this size, and mount it. One that is there is only mounted."""
        folder = self.path(sandbox_id)
        if not (folder / "disk.json").exists():
            try:
                await run_whole(asyncio.to_thread(self._make_from, folder, image=image, size_mib=size_mib))
            except OSError as problem:
                raise _failure("create", sandbox_id, problem) from problem
        return await self.attach(sandbox_id)

    async def hand_over(
        self, sandbox_id: str, *, size_mib: int, image: Path | None = None, layer_comes: bool = False
    ) -> Path:
        """Make the disk for a guest's own kernel, with the files of the copy `image` where there is one; `layer_comes`:
        that of the root is made at the start, of a saved one. It is never mounted here. One that is there stays."""
        folder = self.path(sandbox_id)
        try:
            if not (folder / "disk.json").exists():
                await make_handed(folder, size_mib=size_mib, image=image, layer_comes=layer_comes)
                identity = "" if layer_comes else await asyncio.to_thread(read_identity, folder / ROOT_IMAGE)
                _write_record(folder, size_mib=size_mib, identity=identity, written_by="guest")
        except OSError as problem:
            raise _failure("create", sandbox_id, problem) from problem
        return folder

    async def copy(self, sandbox_id: str, *, to: Path) -> None:
        """Copy its image at one moment; mounted or not. A file beside it (.json) says who wrote its blocks. After a
        failure nothing is at `to`."""
        await run_whole(asyncio.to_thread(self._copy, sandbox_id, to=to))

    async def leave(self, sandbox_id: str, *, to: Path) -> None:
        """As `copy`, of one that nobody writes any more: its image gets a second name, which takes no room."""
        await run_whole(asyncio.to_thread(self._copy, sandbox_id, to=to, shared=True))

    async def park(self, sandbox_id: str) -> None:
        """Only files are left of it: no mount, no loop device. Not there is fine."""
        await asyncio.to_thread(self._park, sandbox_id)

    async def unpark(self, sandbox_id: str) -> Path:
        if self._is_handed(sandbox_id):
            return self.path(sandbox_id)
        return await self.attach(sandbox_id)

    async def mark(self, sandbox_id: str) -> str:
        """Of a parked one, which is all on disk then: another one after any change of its images."""
        return await asyncio.to_thread(mark_of, self._images(sandbox_id))

    def is_marked(self, sandbox_id: str, mark: str) -> bool:
        return mark_of(self._images(sandbox_id), sync=False) == mark

    def digest(self, sandbox_id: str, *, go_on: Callable[[], bool]) -> str | None:
        """Of what is on a parked one."""
        return digest_of(self._images(sandbox_id), go_on=go_on)

    async def sync(self, sandbox_id: str) -> None:
        """All that was written to it is on the volume when this returns."""
        if self._is_handed(sandbox_id):
            try:
                await asyncio.to_thread(sync_handed, self.path(sandbox_id))
            except OSError as problem:
                raise _failure("sync", sandbox_id, problem) from problem
            return
        await asyncio.to_thread(self._on_workspace, "sync", sandbox_id, sync_all)

    async def thaw(self, sandbox_id: str) -> None:
        """Let go what a copy that was cut short still holds. Not frozen is fine."""
        await asyncio.to_thread(self._on_workspace, "thaw", sandbox_id, thaw)

    async def attach(self, sandbox_id: str) -> Path:
        """Mount the disk and give its folder, with `workspace/` and `overlay/`. Already mounted is fine."""
        return await asyncio.to_thread(self._attach, sandbox_id)

    async def detach(self, sandbox_id: str) -> None:
        """Unmount the disk. Not mounted, or not there, is fine."""
        await asyncio.to_thread(self._detach, sandbox_id)

    async def remove(self, sandbox_id: str) -> None:
        """Unmount and remove the disk. Nothing there is fine."""
        await asyncio.to_thread(self._remove, sandbox_id)

    async def used_bytes(self, sandbox_id: str) -> int:
        """Bytes that /workspace takes in its image; those that images take which a guest's kernel writes."""
        try:
            if self._is_handed(sandbox_id):
                return await asyncio.to_thread(taken_bytes, self.path(sandbox_id))
            facts = await asyncio.to_thread(self._measure, sandbox_id)
        except OSError as problem:
            raise NotFound(f"cannot read the disk of sandbox {sandbox_id}", str(problem)) from problem
        return (facts.f_blocks - facts.f_bfree) * facts.f_frsize

    async def room(self, sandbox_id: str) -> DiskRoom:
        """What /workspace can still take."""
        if self._is_handed(sandbox_id):  # nobody here knows: it is never called full
            return DiskRoom(free_bytes=1 << 62, free_inodes=1 << 62, inodes=1 << 62)
        try:
            facts = await asyncio.to_thread(self._measure, sandbox_id)
        except OSError as problem:
            raise NotFound(f"cannot read the disk of sandbox {sandbox_id}", str(problem)) from problem
        return DiskRoom(free_bytes=facts.f_bavail * facts.f_frsize, free_inodes=facts.f_favail, inodes=facts.f_files)

    async def promised_bytes(self, *, of: Collection[str]) -> int:
        """What the disks of these sandboxes may still take of the volume: they are sparse."""
        return await asyncio.to_thread(promised, self._folder, of=of)

    async def leftovers(self) -> list[str]:
        """Ids of all sandboxes that have a disk folder or a loop device here."""
        return await asyncio.to_thread(self._leftovers)

    def _images(self, sandbox_id: str) -> list[Path]:
        return [self.path(sandbox_id) / name for name in ("image", ROOT_IMAGE)]

    def _is_handed(self, sandbox_id: str) -> bool:
        return (self.path(sandbox_id) / ROOT_IMAGE).exists()

    def _measure(self, sandbox_id: str) -> os.statvfs_result:
        folder = self.path(sandbox_id)
        if not is_mounted(folder):
            raise OSError(errno.ENODEV, "it is not mounted")
        return os.statvfs(folder / "workspace")

    def _leftovers(self) -> list[str]:
        names = set(os.listdir(self._folder)) if self._folder.exists() else set()
        names |= {image.parent.name for image in loops_below(self._folder.resolve()).values()}
        return sorted(names)

    def _place(self, sandbox_id: str, stocked: Stocked) -> bool:
        """Make a disk of the stock, mounted as it is, this sandbox's; False when it is gone. A thread takes longer."""
        folder = self.path(sandbox_id)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            stocked.folder.rename(folder)
        except FileNotFoundError:
            return False
        _write_record(folder, size_mib=stocked.size_mib, identity=stocked.identity)
        return True

    async def _make(self, sandbox_id: str, *, size_mib: int) -> None:
        folder = self.path(sandbox_id)
        identity = str(uuid.uuid4())
        await asyncio.to_thread(prepare_folder, folder)
        await make_image(folder / "image", size_mib=size_mib, identity=identity)
        _write_record(folder, size_mib=size_mib, identity=identity)

    def _make_from(self, folder: Path, *, image: Path, size_mib: int) -> None:
        prepare_folder(folder)
        (folder / "image").unlink(missing_ok=True)
        copy_image(image, folder / "image")
        written_by = _written_by(image.with_suffix(".json"))
        identity = read_identity(folder / "image")
        _write_record(folder, size_mib=size_mib, identity=identity, written_by=written_by, sync=True)

    def _link(self, folder: Path, to: Path) -> bool:
        """False where it is mounted, or on another volume."""
        if is_mounted(folder):
            return False
        try:
            os.link(folder / "image", to)
        except OSError as problem:
            if problem.errno != errno.EXDEV:
                raise
            return False
        return True

    def _copy(self, sandbox_id: str, *, to: Path, shared: bool = False) -> None:
        folder = self.path(sandbox_id)
        try:
            if not (shared and self._link(folder, to)):
                with frozen(folder / "workspace") if is_mounted(folder) else contextlib.nullcontext():
                    copy_image(folder / "image", to)
            # A copy was written by whoever wrote the original.
            to.with_suffix(".json").write_text(json.dumps({"written_by": _written_by(folder / "disk.json")}))
        except FileNotFoundError as problem:
            raise NotFound(f"cannot copy the disk of sandbox {sandbox_id}", "it has none") from problem
        except OSError as problem:
            to.unlink(missing_ok=True)
            raise _failure("copy", sandbox_id, problem) from problem

    def _park(self, sandbox_id: str) -> None:
        self._detach(sandbox_id)
        try:
            wait_released(self.path(sandbox_id))
        except FileNotFoundError:
            return
        except OSError as problem:
            raise _failure("unmount", sandbox_id, problem) from problem

    def _on_workspace(self, verb: str, sandbox_id: str, do: Callable[[Path], None]) -> None:
        folder = self.path(sandbox_id)
        try:
            if is_mounted(folder):
                do(folder / "workspace")
        except OSError as problem:
            raise _failure(verb, sandbox_id, problem) from problem

    def _attach(self, sandbox_id: str) -> Path:
        folder = self.path(sandbox_id)
        try:
            if not (folder / "disk.json").exists():
                raise NotFound(f"cannot mount the disk of sandbox {sandbox_id}", "it has none")
            if _written_by(folder / "disk.json") != "host":
                raise PlatformError(
                    f"cannot mount the disk of sandbox {sandbox_id}",
                    "its blocks were written by a guest's kernel; the host never mounts such a disk",
                )
            if not is_mounted(folder):
                wait_released(folder)
                if self._hold:
                    hold_blocks(folder / "image")
                mount_disk(folder)
        except FileNotFoundError as problem:
            raise NotFound(f"cannot mount the disk of sandbox {sandbox_id}", "it has none") from problem
        except OSError as problem:
            raise _failure("mount", sandbox_id, problem) from problem
        return folder

    def _detach(self, sandbox_id: str) -> None:
        try:
            unmount_disk(self.path(sandbox_id))
        except OSError as problem:
            raise PlatformError(f"cannot unmount the disk of sandbox {sandbox_id}", str(problem)) from problem

    def _remove(self, sandbox_id: str) -> None:
        try:
            remove_disk(self.path(sandbox_id))
        except OSError as problem:
            raise PlatformError(f"cannot remove the disk of sandbox {sandbox_id}", str(problem)) from problem


def _failure(verb: str, sandbox_id: str, problem: OSError) -> CpuosError:
    what = f"cannot {verb} the disk of sandbox {sandbox_id}"
    if problem.errno == errno.ENOSPC:
        return CapacityExceeded(what, f"the node's data volume has no room: {problem.strerror}")
    return PlatformError(what, str(problem))


def _written_by(record: Path) -> str:
    """Unknown means "guest"."""
    try:
        return str(json.loads(record.read_text()).get("written_by", "guest"))
    except FileNotFoundError:
        return "guest"


def _write_record(folder: Path, *, size_mib: int, identity: str, written_by: str = "host", sync: bool = False) -> None:
    """Last step of making a disk: it exists from here on; with `sync` also after a power cut."""
    record = {
        "format": _FORMAT,
        "sandbox": folder.name,
        "size_mib": size_mib,
        "uuid": identity,
        # Turns to "guest" before a guest kernel gets the blocks, and never back.
        "written_by": written_by,
        "created_at": datetime.now(UTC).isoformat(),
    }
    part = folder / "disk.json.part"
    with part.open("w") as file:
        file.write(json.dumps(record))
        if sync:
            file.flush()
            os.fsync(file.fileno())
    part.rename(folder / "disk.json")
