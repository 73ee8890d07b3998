"""Disks for guests with a kernel of their own: two images, for /workspace and for the root's writable layer.

The host makes the file systems and never looks at them again: from the moment a record says `guest`, which is before
anyone else has the blocks, they are only opened, copied and removed. A kernel that mounts what a hostile kernel has
written is attacked through its own file-system code.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path

from cpuos.node.storage.copying import copy_image
from cpuos.node.storage.folders import prepare_folder
from cpuos.node.storage.image import make_image

__all__ = ["ROOT_IMAGE", "make_handed", "sync_handed", "taken_bytes"]

ROOT_IMAGE = "root.image"
_ROOT, _USER = 0, 1000


async def make_handed(folder: Path, *, size_mib: int, image: Path | None, layer_comes: bool = False) -> None:
    """Both images, new; that of /workspace a copy of `image` where there is one. `layer_comes`: whoever starts the
    machine puts a saved layer in the place of the root's, which is empty until then. Raises OSError."""
    await asyncio.to_thread(prepare_folder, folder)
    if layer_comes:
        made = [asyncio.to_thread(_make_empty, folder / ROOT_IMAGE)]
    else:
        made = [make_image(folder / ROOT_IMAGE, size_mib=size_mib, identity=str(uuid.uuid4()), owner=_ROOT)]
    if image is None:
        made.append(make_image(folder / "image", size_mib=size_mib, identity=str(uuid.uuid4()), owner=_USER))
    else:
        made.append(asyncio.to_thread(_copy, image, folder / "image"))
    # Both come to their end, also when one fails: what is made is removed by its folder.
    for outcome in await asyncio.gather(*made, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def taken_bytes(folder: Path) -> int:
    """What the images take of the volume; what is free in them only the guest knows."""
    return sum(os.lstat(folder / name).st_blocks * 512 for name in ("image", ROOT_IMAGE))


def sync_handed(folder: Path) -> None:
    """What their VMM has written is on the volume; nothing of it is looked at."""
    for name in ("image", ROOT_IMAGE):
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _make_empty(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _copy(image: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    copy_image(image, target)
