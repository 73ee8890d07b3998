"""A small stock of empty disks of the sizes that were asked for last, so that a create waits for no mkfs and no mount.

    disk-stock/<size_mib>.<uuid>/    image, workspace/ and overlay/ as in a sandbox's disk folder, mounted

Nothing but the daemon that made a disk here knows it: what a daemon finds at its start is of a forerunner, perhaps from
before a power cut, and is removed. No guest has seen one.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from cpuos.node.steps import run_whole
from cpuos.node.storage.folders import mount_disk, prepare_folder, remove_disk
from cpuos.node.storage.image import make_image

__all__ = ["DiskStock", "Stocked"]

log = structlog.get_logger("cpuos.node")

# Of each of so many sizes so many disks. An empty image holds some hundred KiB, one of 256 GiB under 3 MiB.
KINDS, DEPTH = 3, 2
MAX_IMAGE_BYTES = 8 << 20
# A volume that is nearly full keeps what it has for the sandboxes.
LEAVE_FREE_BYTES = 1 << 30
# A create is followed by its sandbox's start: that comes first.
SETTLE_S = 0.25
RETRY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Stocked:
    """One disk, taken: whoever has it moves its folder away."""

    folder: Path
    size_mib: int
    identity: str
    """UUID of its file system."""


class _Make(Protocol):
    def __call__(self, folder: Path, *, size_mib: int, identity: str) -> Awaitable[None]: ...


async def _make_disk(folder: Path, *, size_mib: int, identity: str) -> None:
    await run_whole(asyncio.to_thread(prepare_folder, folder))
    await make_image(folder / "image", size_mib=size_mib, identity=identity, idly=True)
    await run_whole(asyncio.to_thread(mount_disk, folder))


class DiskStock:
    """Filled by a task of its own between `start` and `close`; on one loop."""

    def __init__(
        self,
        folder: Path,
        *,
        make: _Make = _make_disk,
        remove: Callable[[Path], None] = remove_disk,
        settle_s: float = SETTLE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._folder = folder
        self._make = make
        self._remove = remove
        self._settle_s = settle_s
        self._retry_s = retry_s
        self._ready: dict[int, deque[Stocked]] = {}
        """By size; the one that was asked for last is the last."""
        self._too_big: set[int] = set()
        self._wanted = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def start(self, *, size_mib: int) -> None:
        """Remove what a forerunner left, and begin with this size."""
        self._note(size_mib)
        self._keeper = asyncio.create_task(self._keep_for_ever())

    async def close(self) -> None:
        """Stop, and leave nothing. Not started is fine."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        self._keeper = None
        self._ready.clear()
        await asyncio.to_thread(lambda: self._remove_each(self._list()))

    def take(self, size_mib: int) -> Stocked | None:
        """A disk of this size, if there is one; either way more of them will be there soon."""
        if self._keeper is None:
            return None
        self._note(size_mib)
        ready = self._ready[size_mib]
        return ready.popleft() if ready else None

    def _note(self, size_mib: int) -> None:
        self._ready[size_mib] = self._ready.pop(size_mib, deque())
        self._wanted.set()

    async def _keep_for_ever(self) -> None:
        await run_whole(asyncio.to_thread(lambda: self._remove_each(self._list())))
        while True:
            await self._wanted.wait()
            await asyncio.sleep(self._settle_s)
            self._wanted.clear()
            try:
                await run_whole(asyncio.to_thread(self._remove_each, self._too_many()))
                while (size_mib := self._short_of()) is not None and self._has_room():
                    await self._add(size_mib)
            except Exception as problem:
                log.warning("disk stock not filled", why=f"{type(problem).__name__}: {problem}")
                await asyncio.sleep(self._retry_s)

    def _too_many(self) -> list[Path]:
        """The disks of sizes that others have taken the place of; nobody can take them any more."""
        dropped = [self._ready.pop(size_mib) for size_mib in list(self._ready)[:-KINDS]]
        return [disk.folder for disks in dropped for disk in disks]

    def _short_of(self) -> int | None:
        """The size asked for last of which there are too few."""
        for size_mib in list(reversed(self._ready))[:KINDS]:
            if len(self._ready[size_mib]) < DEPTH and size_mib not in self._too_big:
                return size_mib
        return None

    def _has_room(self) -> bool:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize > LEAVE_FREE_BYTES

    async def _add(self, size_mib: int) -> None:
        identity = str(uuid.uuid4())
        made = Stocked(folder=self._folder / f"{size_mib}.{identity}", size_mib=size_mib, identity=identity)
        try:
            await self._make(made.folder, size_mib=size_mib, identity=identity)
            if os.lstat(made.folder / "image").st_blocks * 512 <= MAX_IMAGE_BYTES:
                self._ready[size_mib].append(made)
                return
            self._too_big.add(size_mib)
        except BaseException:
            await asyncio.to_thread(self._remove_each, [made.folder])
            raise
        await run_whole(asyncio.to_thread(self._remove_each, [made.folder]))

    def _list(self) -> list[Path]:
        return list(self._folder.iterdir()) if self._folder.exists() else []

    def _remove_each(self, folders: list[Path]) -> None:
        for folder in folders:
            try:
                self._remove(folder)
            except OSError as problem:
                log.warning("disk of the stock not removed", folder=folder.name, why=str(problem))
