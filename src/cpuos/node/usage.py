"""What sandboxes have used, from outside of them: counters of the kernel that outlive this daemon. Nothing is watched,
and nothing is kept but what a pause would end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import structlog

from cpuos.errors import PlatformError
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.types.node import SandboxUsage, Usage

__all__ = ["read_usage", "usage_of"]

log = structlog.get_logger("cpuos.node")

_RUNNING = (Stage.RUNNING, Stage.SAVING, Stage.PAUSING)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def read_usage(kit: Kit) -> list[SandboxUsage]:
    """Of all sandboxes that run and that somebody has asked for: one read of the network for all, one file each."""
    records = [record for record in kit.ledger.all() if record.stage in _RUNNING and record.process is not None]
    sent = await kit.assembly.slots.sent_bytes() if records else {}
    found = []
    for record in records:
        try:
            used = record.used + _until_now(kit, record, sent)
        except (OSError, PlatformError):
            continue  # it has just ended, or its runtime is not there any more
        found.append(SandboxUsage(id=record.id, generation=record.generation, **used.model_dump()))
    return found


async def usage_of(kit: Kit, record: Record) -> Usage:
    """Of one whose processes end now: what its record is to keep. What cannot be read any more is not in it."""
    if record.process is None:
        return record.used
    try:
        return record.used + _until_now(kit, record, await kit.assembly.slots.sent_bytes())
    except (OSError, PlatformError) as problem:
        log.warning("usage not read", sandbox=record.id, why=str(problem))
        return record.used


def _until_now(kit: Kit, record: Record, sent: Mapping[str, int]) -> Usage:
    """Of its processes of now. The clock is that of their start, which no one sets."""
    assert record.process is not None
    ran_s = time.clock_gettime(time.CLOCK_BOOTTIME) - record.process.start_time / _TICKS_PER_S
    cpu_seconds = kit.runtime_of(record).cpu_seconds(record.id)
    return Usage(ran_s=ran_s, cpu_seconds=cpu_seconds, sent_bytes=sent.get(record.id, 0))
