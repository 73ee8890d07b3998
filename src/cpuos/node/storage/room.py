"""Room on the volume is looked for before it is taken: disks of running sandboxes are sparse, and one that finds none
when it grows has an input or output error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["require_room"]

# What is left for the disks: this much, or this share of a small volume.
_LEAVE_BYTES, _LEAVE_SHARE = 1 << 30, 20


def require_room(place: Path | int, needed: int) -> None:
    """Raise OSError (ENOSPC) unless so many bytes can be written on the volume of this folder or open file."""
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    left = min(_LEAVE_BYTES, status.f_blocks * status.f_frsize // _LEAVE_SHARE)
    if free < needed + left:
        told = f"{needed >> 20} MiB are needed, and {max(0, free - left) >> 20} MiB of the volume may be taken"
        raise OSError(errno.ENOSPC, told)
