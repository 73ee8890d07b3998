"""What the host has to give: read from the kernel at each call."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "available_memory_mib",
    "boot_id",
    "cpu_count",
    "free_disk_mib",
    "held_disk_mib",
    "memory_mib",
    "memory_stalled",
    "most_processes",
    "short_of_memory",
]

_LEAST_FREE_MIB, _LEAST_FREE_SHARE = 512, 16
_MOST_STALLED = 10.0


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
    blocks = 0
    try:
        folders = os.listdir(disks)
    except FileNotFoundError:  # none was made yet
        return 0
    for folder in folders:
        for name in ("image", "root.image"):
            try:  # asked at each create, of what may be a thousand: paths as objects would take ten times as long
                blocks += os.lstat(f"{disks}/{folder}/{name}").st_blocks
            except (FileNotFoundError, NotADirectoryError):  # there is none, or it was removed meanwhile
                continue
    return blocks * 512 >> 20


def available_memory_mib(proc: Path = Path("/proc")) -> int:
    """What could be taken without swapping; very much where the kernel does not say."""
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) >> 10
    return 1 << 30


def short_of_memory(*, mark_mib: int = 0, proc: Path = Path("/proc")) -> str:
    """Why the host is; empty: it is not. `mark_mib`: so much is to be free; 0: a sixteenth of all, 512 MiB at least.

    That processes wait for memory counts only where less than twice as much is free: a guest at its own limit waits
    too, however much the host has.
    """
    needed = mark_mib or max(_LEAST_FREE_MIB, memory_mib() // _LEAST_FREE_SHARE)
    free = available_memory_mib(proc)
    if free < needed:
        return f"{free} MiB of the host's memory are free, and {needed} MiB are to be"
    stalled = memory_stalled(proc)
    if stalled > _MOST_STALLED and free < 2 * needed:
        return f"the host waited for memory {stalled:g} % of the last ten seconds, with {free} MiB free"
    return ""


def memory_stalled(proc: Path = Path("/proc")) -> float:
    """Hundredths of the last ten seconds in which something waited for memory (Documentation/accounting/psi.rst); 0
    where the kernel counts no stalls."""
    try:
        words = (proc / "pressure/memory").read_text().splitlines()[0].split()
        return float(dict(word.split("=") for word in words[1:])["avg10"])
    except (OSError, IndexError, KeyError, ValueError):
        return 0.0


def most_processes(proc: Path = Path("/proc")) -> int:
    """Threads that the kernel lets there be at once."""
    return min(int((proc / "sys/kernel" / name).read_text()) for name in ("pid_max", "threads-max"))
