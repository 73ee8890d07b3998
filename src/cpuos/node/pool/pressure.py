"""Whether the host can spare what ready sandboxes take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cpuos.node.host import short_of_memory

__all__ = ["Pressure", "read_pressure"]

_LEAST_FREE_DISK_MIB = 1024


@dataclass(frozen=True, kw_only=True)
class Pressure:
    is_high: bool
    """Ready sandboxes should go."""
    why: str = ""


def read_pressure(volume: Path, *, proc: Path = Path("/proc")) -> Pressure:
    """`volume`: any folder of the data volume. Of a kernel that counts no stalls only free memory is known."""
    if why := short_of_memory(proc=proc):
        return Pressure(is_high=True, why=why)
    status = os.statvfs(volume)
    disk = status.f_bavail * status.f_frsize >> 20
    if disk < _LEAST_FREE_DISK_MIB:
        return Pressure(is_high=True, why=f"{disk} MiB of the data volume are free")
    return Pressure(is_high=False)
