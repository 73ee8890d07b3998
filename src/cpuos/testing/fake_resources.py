"""Disks and network slots of the fake runtime: folders, no rights needed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Callable, Collection
from pathlib import Path

from cpuos.errors import NotFound, PlatformError
from cpuos.node.resources import DiskRoom
from cpuos.runtimes.base import GuestLink
from cpuos.types.network import EffectivePolicy

__all__ = ["AGENT_SOCKET", "FakeDisks", "FakeSlots"]

AGENT_SOCKET = "a"  # a socket's path has 107 bytes at most


class FakeDisks:
    """A disk is a folder; its size is not kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Nothing is made in advance."""

    async def close(self) -> None:
        """Nothing to stop."""

    def path(self, sandbox_id: str) -> Path:
        return self._folder / sandbox_id

    async def create(self, sandbox_id: str, *, size_mib: int) -> Path:
        for name in ("workspace", "overlay"):
            (self.path(sandbox_id) / name).mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(self.path(sandbox_id) / "workspace", 1000, 1000)
        return self.path(sandbox_id)

    async def park(self, sandbox_id: str) -> None:
        """A folder is always only files."""

    async def unpark(self, sandbox_id: str) -> Path:
        return self.path(sandbox_id)

    async def mark(self, sandbox_id: str) -> str:
        return self._mark(sandbox_id)

    def is_marked(self, sandbox_id: str, mark: str) -> bool:
        return self._mark(sandbox_id) == mark

    def _mark(self, sandbox_id: str) -> str:
        return " ".join(
            f"{path.name}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
            for path, status in self._files(sandbox_id)
        )

    def digest(self, sandbox_id: str, *, go_on: Callable[[], bool]) -> str | None:
        digest = hashlib.sha256()
        for path, _ in self._files(sandbox_id):
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
        return digest.hexdigest()

    def _files(self, sandbox_id: str) -> list[tuple[Path, os.stat_result]]:
        found = [(path, path.lstat()) for path in sorted(self.path(sandbox_id).rglob("*"))]
        return [(path, status) for path, status in found if stat.S_ISREG(status.st_mode)]

    async def sync(self, sandbox_id: str) -> None:
        """Tests cut no power."""

    async def thaw(self, sandbox_id: str) -> None:
        """Nothing is ever frozen."""

    async def copy(self, sandbox_id: str, *, to: Path) -> None:
        await asyncio.to_thread(_copy, self.path(sandbox_id) / "workspace", to)

    async def leave(self, sandbox_id: str, *, to: Path) -> None:
        await self.copy(sandbox_id, to=to)

    async def create_from(self, sandbox_id: str, *, image: Path, size_mib: int) -> Path:
        await self.create(sandbox_id, size_mib=size_mib)
        workspace = self.path(sandbox_id) / "workspace"
        await asyncio.to_thread(_copy, image, workspace)
        return self.path(sandbox_id)

    async def hand_over(
        self, sandbox_id: str, *, size_mib: int, image: Path | None = None, layer_comes: bool = False
    ) -> Path:
        for name in ("image", "root.image"):
            self.path(sandbox_id).mkdir(parents=True, exist_ok=True)
            (self.path(sandbox_id) / name).touch()
        return self.path(sandbox_id)

    async def remove(self, sandbox_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self.path(sandbox_id), ignore_errors=True)

    async def used_bytes(self, sandbox_id: str) -> int:
        files = self.path(sandbox_id).rglob("*")
        return sum(path.lstat().st_size for path in files)

    async def room(self, sandbox_id: str) -> DiskRoom:
        return DiskRoom(free_bytes=1 << 40, free_inodes=1 << 20, inodes=1 << 20)

    async def promised_bytes(self, *, of: Collection[str]) -> int:
        return 0

    async def leftovers(self) -> list[str]:
        return sorted(os.listdir(self._folder))


class FakeSlots:
    """A slot is a folder in which the fake agent has its socket; policies are remembered, and hold nothing."""

    def __init__(self, folder: Path) -> None:
        self.policies: dict[str, EffectivePolicy] = {}
        self.sent: dict[str, int] = {}
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for passed in (folder.parent, folder):
            passed.chmod(0o711)  # the gateway's user goes through to the socket

    def path(self, sandbox_id: str) -> Path:
        return self._folder / sandbox_id

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def take(self, sandbox_id: str, policy: EffectivePolicy, *, tap: bool = False) -> Path:
        self.policies[sandbox_id] = policy
        self.path(sandbox_id).mkdir(exist_ok=True)
        self.path(sandbox_id).chmod(0o711)
        return self.path(sandbox_id)

    async def guest_link(self, sandbox_id: str) -> GuestLink:
        address = self.path(sandbox_id) / AGENT_SOCKET  # its agent may not listen yet
        if not self.path(sandbox_id).exists():
            raise NotFound(f"cannot reach sandbox {sandbox_id}", "it has no slot", code="sandbox_not_found")
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        return GuestLink(socket=made, address=str(address))

    async def update(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        self.policies[sandbox_id] = policy

    async def open(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        self.policies[sandbox_id] = policy

    async def readopt(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        if not self.path(sandbox_id).is_dir():
            raise PlatformError(f"cannot find the network slot of sandbox {sandbox_id}")
        self.policies[sandbox_id] = policy

    async def sent_bytes(self) -> dict[str, int]:
        return dict(self.sent)

    async def release(self, sandbox_id: str) -> None:
        self.policies.pop(sandbox_id, None)
        self.sent.pop(sandbox_id, None)
        await asyncio.to_thread(shutil.rmtree, self.path(sandbox_id), ignore_errors=True)

    async def leftovers(self) -> list[str]:
        return sorted(os.listdir(self._folder))


def _copy(folder: Path, target: Path) -> None:
    """With owners, as a disk's image has them."""
    shutil.copytree(folder, target, symlinks=True, dirs_exist_ok=True)
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            status = path.lstat()
            os.chown(target / path.relative_to(folder), status.st_uid, status.st_gid, follow_symlinks=False)
