"""What the host has to give: read from the kernel at each call."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["boot_id", "cpu_count", "free_disk_mib", "held_disk_mib", "memory_mib"]


def boot_id() -> str:
    """Another one after every boot: what a record of an earlier boot names cannot run any more."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def cpu_count() -> int:
    return len(os.sched_getaffinity(0))


def memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def free_disk_mib(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize >> 20


def held_disk_mib(disks: Path) -> int:
    """What the images of sandboxes' disks have taken of the volume by now. Looks into no image and no mount."""
    held = 0
    for image in disks.glob("*/image"):
        try:
            held += image.lstat().st_blocks * 512
        except FileNotFoundError:  # removed meanwhile
            continue
    return held >> 20
