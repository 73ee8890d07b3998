"""A small stock of empty images of the sizes that were asked for last, so that a create need not wait for mkfs.

    disk-stock/<size_mib>.<uuid>          a whole image that no sandbox has had
    disk-stock/<size_mib>.<uuid>.draft    one that is being made

An image is never mounted here. Nothing but the daemon that made it knows it: what a daemon finds here at its start is
of a forerunner, perhaps from before a power cut, and is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from cpuos.node.storage.image import make_image

__all__ = ["DiskStock", "Stocked"]

log = structlog.get_logger("cpuos.node")

# Of each of so many sizes so many images. An empty image holds some hundred KiB, one of 256 GiB under 3 MiB.
KINDS, DEPTH = 3, 2
MAX_IMAGE_BYTES = 8 << 20
# A volume that is nearly full keeps what it has for the sandboxes.
LEAVE_FREE_BYTES = 1 << 30
# A create is followed by its sandbox's start: that comes first.
SETTLE_S = 0.25
RETRY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Stocked:
    """One image, taken: whoever has it moves it away."""

    path: Path
    identity: str
    """UUID of its file system."""


class _Make(Protocol):
    def __call__(self, path: Path, *, size_mib: int, identity: str, idly: bool) -> Awaitable[None]: ...


class DiskStock:
    """Filled by a task of its own between `start` and `close`; on one loop."""

    def __init__(
        self, folder: Path, *, make: _Make = make_image, settle_s: float = SETTLE_S, retry_s: float = RETRY_S
    ) -> None:
        self._folder = folder
        self._make = make
        self._settle_s = settle_s
        self._retry_s = retry_s
        self._ready: dict[int, deque[Stocked]] = {}
        """By size; the one that was asked for last is the last."""
        self._too_big: set[int] = set()
        self._wanted = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None

    def start(self, *, size_mib: int) -> None:
        """Remove what a forerunner left, and begin with this size."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clear()
        self._note(size_mib)
        self._filler = asyncio.create_task(self._fill_for_ever())

    async def close(self) -> None:
        """Stop, and leave nothing. Not started is fine."""
        if self._filler is None:
            return
        self._filler.cancel()
        await asyncio.wait([self._filler])
        self._filler = None
        self._ready.clear()
        self._clear()

    def take(self, size_mib: int) -> Stocked | None:
        """An image of this size, if there is one; either way more of them will be there soon."""
        if self._filler is None:
            return None
        self._note(size_mib)
        ready = self._ready[size_mib]
        return ready.popleft() if ready else None

    def _note(self, size_mib: int) -> None:
        self._ready[size_mib] = self._ready.pop(size_mib, deque())
        while len(self._ready) > KINDS:
            for old in self._ready.pop(next(iter(self._ready))):
                old.path.unlink(missing_ok=True)
        self._wanted.set()

    async def _fill_for_ever(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(self._settle_s)
            self._wanted.clear()
            try:
                while (size_mib := self._short_of()) is not None and self._has_room():
                    await self._add(size_mib)
            except Exception as problem:
                log.warning("disk stock not filled", why=f"{type(problem).__name__}: {problem}")
                await asyncio.sleep(self._retry_s)

    def _short_of(self) -> int | None:
        """The size asked for last of which there are too few."""
        for size_mib, ready in reversed(self._ready.items()):
            if len(ready) < DEPTH and size_mib not in self._too_big:
                return size_mib
        return None

    def _has_room(self) -> bool:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize > LEAVE_FREE_BYTES

    async def _add(self, size_mib: int) -> None:
        identity = str(uuid.uuid4())
        made = Stocked(path=self._folder / f"{size_mib}.{identity}", identity=identity)
        draft = made.path.with_name(f"{made.path.name}.draft")
        try:
            await self._make(draft, size_mib=size_mib, identity=identity, idly=True)
            if os.lstat(draft).st_blocks * 512 > MAX_IMAGE_BYTES:
                self._too_big.add(size_mib)
            elif size_mib in self._ready:  # else it was asked for so long ago that others took its place meanwhile
                draft.rename(made.path)
                self._ready[size_mib].append(made)
        finally:
            draft.unlink(missing_ok=True)

    def _clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                (self._folder / name).unlink(missing_ok=True)
