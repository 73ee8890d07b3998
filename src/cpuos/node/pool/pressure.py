"""Whether the host can spare what ready sandboxes take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cpuos.node.host import available_memory_mib, memory_mib, memory_stalled

__all__ = ["Pressure", "read_pressure"]

_LEAST_FREE_MIB = 512
_LEAST_FREE_SHARE = 16
# Hundredths of the last ten seconds in which something waited for memory (Documentation/accounting/psi.rst).
_MOST_STALLED = 10.0
_LEAST_FREE_DISK_MIB = 1024


@dataclass(frozen=True, kw_only=True)
class Pressure:
    is_high: bool
    """Ready sandboxes should go."""
    why: str = ""


def read_pressure(volume: Path, *, proc: Path = Path("/proc")) -> Pressure:
    """`volume`: any folder of the data volume. Of a kernel that counts no stalls only free memory is known."""
    needed = max(_LEAST_FREE_MIB, memory_mib() // _LEAST_FREE_SHARE)
    free = available_memory_mib(proc)
    if free < needed:
        return Pressure(is_high=True, why=f"{free} MiB of memory are free, and {needed} stay free")
    stalled = memory_stalled(proc)
    if stalled > _MOST_STALLED:
        return Pressure(is_high=True, why=f"memory was waited for {stalled:g} % of the time")
    status = os.statvfs(volume)
    disk = status.f_bavail * status.f_frsize >> 20
    if disk < _LEAST_FREE_DISK_MIB:
        return Pressure(is_high=True, why=f"{disk} MiB of the data volume are free")
    return Pressure(is_high=False)
