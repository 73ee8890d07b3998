"""What a sandbox has used up of its limits at this moment: asked by the gateway when a command of it fails."""

from __future__ import annotations

from cpuos.node.journal import Record
from cpuos.node.kit import Kit
from cpuos.runtimes.base import Capability
from cpuos.types.limits import FullPlace, LimitFacts, SandboxLimit

__all__ = ["read_limits"]

# ext4 keeps some blocks for its own records and refuses a program before the last one is gone (244 KiB of 64 MiB were
# free as dd failed): one that has so little is full.
_ALMOST_BYTES, _ALMOST_INODES = 1 << 20, 2
_WORKSPACE, _ROOT = "/workspace", "/"


async def read_limits(kit: Kit, record: Record) -> LimitFacts:
    """From outside: the file system's and the runtime's own numbers."""
    request = record.request
    disk_bytes = request.disk_mib << 20
    held = await kit.runtime_of(record).limits(kit.spec_of(record))
    room = await kit.assembly.disks.room(record.id)
    full = []
    if held.processes_full:
        full.append(FullPlace(limit=SandboxLimit.PROCESSES, value=request.max_processes))
    if room.free_inodes < _ALMOST_INODES:
        full.append(FullPlace(limit=SandboxLimit.INODES, value=room.inodes, path=_WORKSPACE))
    if room.free_bytes < _ALMOST_BYTES:
        full.append(FullPlace(limit=SandboxLimit.DISK, value=disk_bytes, path=_WORKSPACE))
    if held.root_full:
        full.append(FullPlace(limit=SandboxLimit.DISK, value=disk_bytes, path=_ROOT))
    return LimitFacts(
        memory_bytes=request.memory_mib << 20,
        disk_bytes=disk_bytes,
        tmp_bytes=held.tmp_bytes,
        processes=request.max_processes,
        guest_knows=Capability.OWN_KERNEL in kit.runtime_of(record).capabilities,
        full=full,
    )
