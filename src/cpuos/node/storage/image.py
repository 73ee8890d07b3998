"""An image: a sparse file with an empty ext4 file system in it."""

from __future__ import annotations

import asyncio
import errno
import os
import uuid
from pathlib import Path

from cpuos.node.storage.geometry import geometry_for

__all__ = ["MKFS", "hold_blocks", "make_image", "read_identity"]

MKFS = "/usr/sbin/mkfs.ext4"
# Runs only while nobody else wants the processor or the disk.
_IDLY = ("/usr/bin/chrt", "--idle", "0", "/usr/bin/ionice", "--class", "3")


async def make_image(path: Path, *, size_mib: int, identity: str, idly: bool = False, owner: int = 1000) -> None:
    """Make it anew at `path`, for `size_mib` of files, its top folder the owner's. Raises OSError; what is there then
    is of no use."""
    geometry = geometry_for(size_mib)
    await asyncio.to_thread(_make_sparse, path, size=geometry.image_mib << 20)
    command = [*(_IDLY if idly else ()), MKFS, "-U", identity, *geometry.mkfs_arguments(owner=owner), str(path)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, text = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise OSError(errno.EIO, text.decode(errors="replace").strip() or f"mkfs.ext4 ended with {process.returncode}")


def hold_blocks(path: Path) -> None:
    """Give it all its blocks, which changes nothing of what it holds: nothing else can take them from now on."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def read_identity(path: Path) -> str:
    """The UUID in its superblock (ext4: s_uuid)."""
    with path.open("rb") as file:
        file.seek(1024 + 0x68)
        return str(uuid.UUID(bytes=file.read(16)))


def _make_sparse(path: Path, *, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)
