"""The receipt of a pause: what ran and listened then. A resume is held against it, and says what did not come back."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Row

from cpuos.errors import CpuosError
from cpuos.server.asks import what_is_missing
from cpuos.server.gateway import Suspended
from cpuos.types.node import Restored, SandboxFacts

__all__ = ["missing_of", "not_all", "receipt_of", "resumed"]

_SHOWN = 100
_NAMED = 5


def receipt_of(row: Row[Any], told: Suspended | None, *, now: datetime) -> dict[str, Any] | None:
    """`told` is the guest's own word; None where the server was ended before it could write it down."""
    if told is None:
        return None
    return {
        "at": now.isoformat(),
        "processes": told.processes,
        "programs": told.programs,
        "listeners": sorted({f"{one.address}:{one.port}" for one in told.listeners}),
        "commands": told.commands,
        "policy_version": row.network_version,
        "labels": row.labels,
    }


def resumed(row: Row[Any], facts: SandboxFacts, *, missing: list[str]) -> dict[str, Any]:
    """Changes of a record of one that goes on: what came back, and what did not of that which its receipt names.
    `missing`: what its guest found gone when it went on."""
    whole = facts.restored is Restored.MEMORY
    gone = [*facts.missing, *(missing if whole else _gone(row.receipt))][:_SHOWN]
    reason = what_is_missing(facts, verb="resumed")
    return {
        "reason": reason or (not_all(gone, verb="resumed") if gone else ""),
        "resumed_from": "memory" if whole else "files",
        "restore_incomplete": gone,
    }


def not_all(missing: list[str], *, verb: str) -> str:
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return f"{verb} without {', '.join(missing[:_NAMED])}{more}"


def missing_of(error: CpuosError) -> list[str] | None:
    """What is gone, where that is why it was not resumed."""
    if error.code != "restore_incomplete":
        return None
    return [str(one) for one in error.details.get("missing", [])]


def _gone(receipt: dict[str, Any] | None) -> list[str]:
    """All that ran: it began anew."""
    if receipt is None:
        return ["all processes"]
    count = receipt["processes"]
    processes = [f"{count} process{'' if count == 1 else 'es'}"] if count else []
    commands = [f"command {one}" for one in receipt["commands"]]
    return (processes + commands + [f"listener on {one}" for one in receipt["listeners"]])[:_SHOWN]
