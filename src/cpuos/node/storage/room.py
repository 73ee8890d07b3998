"""Room on the volume is looked for before it is taken: disks of running sandboxes are sparse, and one that finds none
when it grows has an input or output error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["free_bytes", "promised", "require_fit", "require_room", "volume_bytes"]

# What is left for the disks: this much, or this share of a small volume.
_LEAVE_BYTES, _LEAVE_SHARE = 1 << 30, 20
# What those take who only take up again what is theirs.
_MARGIN_BYTES = 16 << 20


def free_bytes(place: Path) -> int:
    """What may be taken of the volume of this folder."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def volume_bytes(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_blocks * status.f_frsize


def promised(disks: Path, *, of: Iterable[str]) -> int:
    """Bytes that the images of these sandboxes' disks in this folder do not hold yet."""
    promised = 0
    for sandbox_id in of:
        try:
            status = os.lstat(f"{disks}/{sandbox_id}/image")
        except FileNotFoundError:  # there is none, or it was removed meanwhile
            continue
        promised += max(0, status.st_size - status.st_blocks * 512)
    return promised


def require_room(place: Path | int, needed: int, *, promised: int = 0) -> None:
    """Raise OSError (ENOSPC) unless so many bytes can be written on the volume of this folder or open file, and what is
    promised to others is there after it."""
    status = os.statvfs(place)
    share = status.f_blocks * status.f_frsize // _LEAVE_SHARE
    _require(status, needed, leave=max(promised, min(_LEAVE_BYTES, share)))


def require_fit(place: Path, needed: int) -> None:
    """The same for what was there already and was promised as others' was: it must fit, and no more."""
    _require(os.statvfs(place), needed, leave=_MARGIN_BYTES)


def _require(status: os.statvfs_result, needed: int, *, leave: int) -> None:
    free = status.f_bavail * status.f_frsize
    if free < needed + leave:
        told = f"{needed >> 20} MiB are needed, and {max(0, free - leave) >> 20} MiB of the volume may be taken"
        raise OSError(errno.ENOSPC, told)
