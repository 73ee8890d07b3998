"""One folder a sandbox: the ext4 image of its /workspace, and the place of its root's writable layer.

    disks/<id>/disk.json     what it is, and who wrote its blocks
    disks/<id>/image         sparse ext4 image, mounted on
    disks/<id>/workspace/    (root of that file system, owner 1000:1000)
    disks/<id>/overlay/      root 0700: gVisor keeps its unlinked filestore here

A new disk gets an image of the stock, where that has one of its size (stock.py).
Workspace and root layer each hold the sandbox's disk size. They do not share one file system on purpose: see
docs/adr/0006-workspace-image-and-root-layer.md.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import struct
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

from cpuos.errors import NotFound, PlatformError, SetupRequired
from cpuos.node import syscalls
from cpuos.node.storage.geometry import geometry_for
from cpuos.node.storage.image import MKFS, make_image
from cpuos.node.storage.loop import attach_loop, loops_below
from cpuos.node.storage.stock import DiskStock, Stocked
from cpuos.types.sandbox import SandboxCreate

__all__ = ["DiskStore"]

_FORMAT = 1
_MOUNT_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOSYMFOLLOW | syscalls.MS_NOATIME
# fs/ext4/ext4.h: _IOR('X', 125, __u32) and EXT4_GOING_FLAGS_NOLOGFLUSH.
_EXT4_IOC_SHUTDOWN, _SHUTDOWN_WITHOUT_LOG = 0x8004587D, 2
# A gofer that is still on its way out keeps the mount busy for some milliseconds.
_BUSY_S = 2.0


class DiskStore:
    """Makes, mounts, unmounts and removes the disks below one folder (root, 0700)."""

    def __init__(self, folder: Path, *, stock: Path | None = None) -> None:
        """`stock`: a folder on the same volume for images made in advance, once `start` was called."""
        self._folder = folder
        self._stock = DiskStock(stock) if stock is not None else None

    def start(self) -> None:
        """Begin to keep a stock of images, first of the size that a sandbox has unless another is asked for."""
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
        if (self.path(sandbox_id) / "disk.json").exists():
            return await self.attach(sandbox_id)
        stocked = self._stock.take(size_mib) if self._stock is not None else None
        try:
            if stocked is None or not await asyncio.to_thread(self._place, sandbox_id, stocked, size_mib=size_mib):
                await self._make(sandbox_id, size_mib=size_mib)
        except FileNotFoundError as problem:
            raise SetupRequired(
                f"cannot create the disk of sandbox {sandbox_id}", f"{MKFS} is not there", hint="cpuos doctor"
            ) from problem
        except OSError as problem:
            raise PlatformError(f"cannot create the disk of sandbox {sandbox_id}", str(problem)) from problem
        return await self.attach(sandbox_id)

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
        """Bytes that /workspace takes in its image."""
        try:
            facts = await asyncio.to_thread(self._measure, sandbox_id)
        except OSError as problem:
            raise NotFound(f"cannot read the disk of sandbox {sandbox_id}", str(problem)) from problem
        return (facts.f_blocks - facts.f_bfree) * facts.f_frsize

    async def leftovers(self) -> list[str]:
        """Ids of all sandboxes that have a disk folder or a loop device here."""
        return await asyncio.to_thread(self._leftovers)

    def _measure(self, sandbox_id: str) -> os.statvfs_result:
        folder = self.path(sandbox_id)
        if not _is_mounted(folder):
            raise OSError(errno.ENODEV, "it is not mounted")
        return os.statvfs(folder / "workspace")

    def _leftovers(self) -> list[str]:
        names = set(os.listdir(self._folder)) if self._folder.exists() else set()
        names |= {image.parent.name for image in loops_below(self._folder.resolve()).values()}
        return sorted(names)

    def _place(self, sandbox_id: str, stocked: Stocked, *, size_mib: int) -> bool:
        """Make the disk of an image of the stock; False when that is gone."""
        folder = self.path(sandbox_id)
        _prepare_folder(folder)
        try:
            stocked.path.rename(folder / "image")
        except FileNotFoundError:
            return False
        _write_record(folder, size_mib=size_mib, identity=stocked.identity)
        return True

    async def _make(self, sandbox_id: str, *, size_mib: int) -> None:
        folder = self.path(sandbox_id)
        identity = str(uuid.uuid4())
        await asyncio.to_thread(_prepare_folder, folder)
        await make_image(folder / "image", size_mib=size_mib, identity=identity)
        _write_record(folder, size_mib=size_mib, identity=identity)

    def _attach(self, sandbox_id: str) -> Path:
        folder = self.path(sandbox_id)
        workspace = folder / "workspace"
        try:
            record = json.loads((folder / "disk.json").read_text())
            if record.get("written_by") != "host":
                raise PlatformError(
                    f"cannot mount the disk of sandbox {sandbox_id}",
                    "its blocks were written by a guest's kernel; the host never mounts such a disk",
                )
            if _is_mounted(folder):
                return folder
            _wait_released(folder)
            _mount_image(folder / "image", workspace)
            _remove_lost_found(workspace)
        except FileNotFoundError as problem:
            raise NotFound(f"cannot mount the disk of sandbox {sandbox_id}", "it has none") from problem
        except OSError as problem:
            raise PlatformError(f"cannot mount the disk of sandbox {sandbox_id}", str(problem)) from problem
        return folder

    def _detach(self, sandbox_id: str) -> None:
        folder = self.path(sandbox_id)
        deadline = time.monotonic() + _BUSY_S
        try:
            while _is_mounted(folder):
                patient = time.monotonic() < deadline
                flags = syscalls.UMOUNT_NOFOLLOW | (0 if patient else syscalls.MNT_DETACH)
                try:
                    syscalls.umount(str(folder / "workspace"), flags)
                except OSError as problem:
                    if problem.errno != errno.EBUSY or not patient:
                        raise
                    time.sleep(0.005)
        except FileNotFoundError:
            return
        except OSError as problem:
            raise PlatformError(f"cannot unmount the disk of sandbox {sandbox_id}", str(problem)) from problem

    def _remove(self, sandbox_id: str) -> None:
        _abandon(self.path(sandbox_id))
        self._detach(sandbox_id)
        try:
            folder = os.open(self.path(sandbox_id), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            # The record goes first: what is left without it is an unfinished disk that `create` makes anew.
            _unlink(folder, "disk.json")
            _unlink(folder, "image")
            _remove_folder(folder, "workspace")
            _remove_folder(folder, "overlay")
            for name in os.listdir(folder):
                _unlink(folder, name)
            os.rmdir(self.path(sandbox_id))
        except OSError as problem:
            raise PlatformError(f"cannot remove the disk of sandbox {sandbox_id}", str(problem)) from problem
        finally:
            os.close(folder)


def _prepare_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("workspace", "overlay"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)


def _write_record(folder: Path, *, size_mib: int, identity: str) -> None:
    """Last step of making a disk: it exists from here on."""
    record = {
        "format": _FORMAT,
        "sandbox": folder.name,
        "size_mib": size_mib,
        "uuid": identity,
        # Turns to "guest" before a guest kernel gets the blocks, and never back.
        "written_by": "host",
        "created_at": datetime.now(UTC).isoformat(),
    }
    part = folder / "disk.json.part"
    part.write_text(json.dumps(record))
    part.rename(folder / "disk.json")


def _mount_image(image: Path, target: Path) -> None:
    fd = os.open(image, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        device, loop = attach_loop(fd)
        try:
            syscalls.mount(device, str(target), kind="ext4", flags=_MOUNT_FLAGS, data="errors=remount-ro")
        finally:
            os.close(loop)
    finally:
        os.close(fd)


def _remove_lost_found(workspace: Path) -> None:
    """A new file system has it; a user's empty folder has not. A name of the user's own is not touched (not root's)."""
    path = workspace / "lost+found"
    try:
        facts = os.lstat(path)
        if facts.st_uid == 0 and facts.st_ino == _LOST_FOUND_INODE:
            os.rmdir(path)
    except OSError:
        pass


# The first inode that mkfs gives out (ext4's EXT4_GOOD_OLD_FIRST_INO).
_LOST_FOUND_INODE = 11


def _is_mounted(folder: Path) -> bool:
    return os.lstat(folder / "workspace").st_dev != os.lstat(folder).st_dev


def _abandon(folder: Path) -> None:
    """Throw away what was not written yet: writing gigabytes into an image that goes next would take seconds."""
    try:
        if _is_mounted(folder):
            fd = os.open(folder / "workspace", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _SHUTDOWN_WITHOUT_LOG))
            finally:
                os.close(fd)
    except OSError:
        pass  # nothing there, or an older kernel: the unmount writes it all then


def _wait_released(folder: Path) -> None:
    """An image has one holder: a lazy unmount may still have it for a moment."""
    deadline = time.monotonic() + _BUSY_S
    while loops_below(folder.resolve()):
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, "another loop device still holds the image")
        time.sleep(0.005)


def _unlink(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def _remove_folder(parent: int, name: str) -> None:
    """Remove a folder of ours with the plain files in it; it has no others."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        if os.fstat(fd).st_dev != os.fstat(parent).st_dev:
            raise OSError(errno.EBUSY, "still mounted", name)
        for entry in os.listdir(fd):
            _unlink(fd, entry)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
