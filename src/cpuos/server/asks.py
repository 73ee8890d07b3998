"""What a record or a request asks of scheduler and node."""

from __future__ import annotations

import secrets
import string
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row

from cpuos.scheduler.base import Capacity, Demand, Placement
from cpuos.server.templates.names import Meaning
from cpuos.types.network import EffectivePolicy
from cpuos.types.node import NodeSandboxCreate, Restored, SandboxFacts
from cpuos.types.sandbox import SandboxCreate, SandboxState

__all__ = [
    "amount_of",
    "demand_of_request",
    "first_record",
    "hostname_of",
    "new_id",
    "node_request",
    "snapshot_amount",
    "what_is_missing",
    "whole_of",
]

_ID_LETTERS = string.ascii_lowercase + string.digits


def new_id() -> str:
    """Of a sandbox or a snapshot."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(20))


def demand_of_request(request: SandboxCreate, template: str, *, origin: Row[Any] | None) -> Demand:
    """What a new sandbox takes; with a snapshot to begin with, where that lies. `template` is the node's name of it."""
    return Demand(
        template=template,
        runtime=request.runtime if origin is None else origin.runtime,
        min_isolation=request.min_isolation,
        allow_emulated=request.allow_emulated,
        cpu=request.cpu,
        memory_mib=request.memory_mib,
        disk_mib=request.disk_mib,
        node=None if origin is None else origin.node,
        max_processes=request.max_processes,
        # Its host name is its id then: that of a ready one is fixed.
        for_anyone=request.name is None
        and not request.packs
        and (origin is None or (origin.memory and not origin.packs)),
        snapshot=None if origin is None else origin.id,
    )


def first_record(
    sandbox_id: str, request: SandboxCreate, *, placement: Placement, meaning: Meaning, now: datetime
) -> dict[str, Any]:
    """What is recorded of a new sandbox before anything is made: what was asked for, and where it is to be."""
    return {
        **request.model_dump(exclude={"runtime", "min_isolation", "allow_emulated"}),
        "network": request.network.model_dump(mode="json"),
        "id": sandbox_id,
        "state": SandboxState.CREATING.value,
        "template": meaning.name,
        "image": meaning.image,
        "template_digest": placement.template_digest,
        "runtime": placement.runtime,
        "isolation": placement.isolation.value,
        "isolation_detail": placement.isolation_detail,
        "node": placement.node,
        "created_at": now,
        "changed_at": now,
        "expires_at": now + timedelta(seconds=request.timeout_s),
    }


def amount_of(row: Row[Any]) -> Capacity:
    """What the sandbox on record holds of its node: a paused one its disk alone."""
    return whole_of(row).parked if row.state == SandboxState.PAUSED.value else whole_of(row)


def whole_of(row: Row[Any]) -> Capacity:
    """What it holds while it runs."""
    return Capacity(sandboxes=1, cpu=row.cpu, memory_mib=row.memory_mib, disk_mib=row.disk_mib)


def snapshot_amount(row: Row[Any]) -> Capacity:
    """What a snapshot may take at most while it is made; when it is there, the node's free room says what it took."""
    return Capacity(disk_mib=row.disk_mib + (row.memory_mib if row.memory else 0))


def hostname_of(row: Row[Any]) -> str:
    return row.name or row.id


def node_request(
    row: Row[Any], policy: EffectivePolicy, *, origin: Row[Any] | None = None, ready: bool = False
) -> NodeSandboxCreate:
    """The create of a recorded sandbox as its node takes it; `ready`: it was chosen among those that are."""
    return NodeSandboxCreate(
        id=row.id,
        generation=row.generation,
        template=row.image or row.template,
        runtime=row.runtime,
        hostname=hostname_of(row),
        cpu=row.cpu,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        max_processes=row.max_processes,
        network=policy,
        snapshot=None if origin is None else origin.id,
        warm=origin is None or origin.memory,
        packs={path: pack["image"] for path, pack in row.packs.items()},
        ready=ready,
        root_interval_s=row.root_checkpoint_interval_s,
    )


def what_is_missing(facts: SandboxFacts, *, verb: str, memory: bool = True) -> str:
    """What did not come back of that which was saved, with `memory` or as files alone. Empty where all did."""
    lacking = {
        Restored.ROOT: "its processes" if memory else "",
        Restored.WORKSPACE: "its processes and the files outside of /workspace"
        if memory
        else "the files outside of /workspace",
    }.get(facts.restored, "")
    if not lacking:
        return ""
    return f"{verb} without {lacking}" + (f": {facts.pause_reason}" if facts.pause_reason else "")
