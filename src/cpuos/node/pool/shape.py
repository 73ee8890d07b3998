"""What a ready sandbox is known by: everything that its start has fixed."""

from __future__ import annotations

from dataclasses import dataclass

from cpuos.node.journal import Record
from cpuos.types.node import NodeSandboxCreate

__all__ = ["Shape", "is_for_anyone", "shape_of", "shape_of_record"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sandboxes of one shape differ in nothing but what is theirs alone. The template's name is part of it, for the
    image of a build belongs to one workspace, also where another has an equal one."""

    template: str
    template_digest: str
    runtime: str
    cpu: int
    memory_mib: int
    disk_mib: int
    max_processes: int
    snapshot: str | None = None
    """With the processes of this one."""


def shape_of(request: NodeSandboxCreate, *, digest: str) -> Shape:
    return Shape(
        template=request.template,
        template_digest=digest,
        runtime=request.runtime,
        cpu=request.cpu,
        memory_mib=request.memory_mib,
        disk_mib=request.disk_mib,
        max_processes=request.max_processes,
        snapshot=request.snapshot,
    )


def shape_of_record(record: Record) -> Shape:
    return shape_of(record.request, digest=record.template_digest)


def is_for_anyone(request: NodeSandboxCreate) -> bool:
    """Whether a ready sandbox can stand in for it: the host name is fixed at the start too, and is the id then."""
    fixed = request.generation == 1 and request.hostname == request.id and not request.packs
    return fixed and (request.snapshot is None or request.warm)
