"""What a record says of a loss, and of what came back when the sandbox was made anew."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Row

from cpuos.errors import CpuosError
from cpuos.server.asks import what_is_missing
from cpuos.types.node import Restored, SandboxFacts
from cpuos.types.sandbox import HOST_RESTARTED, Isolation, Recreated

__all__ = ["given_up", "recreated"]

# What such a guest has not synced is in the memory of its own kernel, and ends with it.
_OWN_KERNEL = (Isolation.MICROVM, Isolation.EMULATED)


def recreated(row: Row[Any], facts: SandboxFacts, *, now: datetime) -> dict[str, Any]:
    """Changes of a record of one that was lost and runs again; none for another one."""
    if row.lost_at is None:
        return {}
    root_at = facts.restored_at if facts.restored is Restored.ROOT else None
    told = Recreated(
        at=now,
        lost_at=row.lost_at,
        lost_reason=row.lost_reason or "",
        workspace="synced" if row.lost_reason == HOST_RESTARTED or row.isolation in _OWN_KERNEL else "all",
        root="template" if root_at is None else "saved",
        root_at=root_at,
        root_age_s=None if root_at is None else max(0.0, (row.lost_at - root_at).total_seconds()),
    )
    missing = what_is_missing(facts, verb="recreated", memory=False)
    return {"recreated": told.model_dump(mode="json"), "reason": missing, "lost_at": None, "lost_reason": None}


def given_up(row: Row[Any], error: CpuosError) -> dict[str, Any]:
    """Changes of a record of one that could not be made anew: its loss is what it was, and may be tried again."""
    why = ": ".join(part for part in (error.what, error.why) if part)
    return {"reason": f"{row.lost_reason}; {why}", "ended_at": row.lost_at}
