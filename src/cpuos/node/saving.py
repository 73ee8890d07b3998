"""What pauses and snapshots have in common: the steps that save a sandbox, and what is said of it."""

from __future__ import annotations

import asyncio
from datetime import datetime

from cpuos.errors import Conflict
from cpuos.node.images import AGENT, MEMORY, ROOT, Manifest
from cpuos.node.journal import Record
from cpuos.node.kit import Kit
from cpuos.node.refusals import could_not
from cpuos.node.steps import Step
from cpuos.node.storage.room import require_fit, require_room
from cpuos.runtimes.base import Capability, Runtime

__all__ = ["check_room_to_restore", "manifest_of", "needs", "save_steps"]


def needs(runtime: Runtime, verb: str, sandbox_id: str, capability: Capability = Capability.PAUSE) -> None:
    """Raise unless the runtime can save its sandboxes so."""
    if capability not in runtime.capabilities:
        raise Conflict(f"cannot {verb} sandbox: {sandbox_id}", f"runtime {runtime.name!r} has no {capability.value}")


def manifest_of(record: Record, *, name: str, runtime: Runtime, now: datetime, freeze: str | None = None) -> Manifest:
    request = record.request
    return Manifest(
        name=name,
        sandbox=record.id,
        generation=record.generation,
        incarnation=record.incarnation,
        freeze=record.thaw if freeze is None else freeze,
        template=request.template,
        template_digest=record.template_digest,
        runtime=request.runtime,
        runtime_version=runtime.version_of(record.id),
        cpu=request.cpu,
        memory_mib=request.memory_mib,
        disk_mib=request.disk_mib,
        max_processes=request.max_processes,
        policy=record.policy,
        packs=request.packs,
        created_at=now,
    )


async def check_room_to_restore(kit: Kit, saved: Manifest, *, verb: str, sandbox_id: str) -> None:
    """Raise unless there is room for the root's layer, the only thing that a restore writes."""
    kit.volume.require(f"cannot {verb} sandbox: {sandbox_id}")
    needed = sum(size for file, size in saved.files.items() if file.startswith(f"{ROOT}/"))
    try:
        await asyncio.to_thread(require_fit, kit.assembly.images.path(saved.name), needed)
    except OSError as error:
        raise could_not(verb, sandbox_id, error) from error


def save_steps(
    kit: Kit, record: Record, *, runtime: Runtime, name: str, memory: bool, replaces: bool = False
) -> list[Step]:
    """Begin the image of this name; save processes where they are asked for, and files where the runtime can save them
    apart: those are taken where processes cannot be. The sandbox runs on. One that `replaces` another leaves that where
    it fails."""
    images = kit.assembly.images

    async def begin() -> None:
        kit.volume.require(f"cannot save sandbox: {record.id}")
        needed = await runtime.image_bytes(record.id)
        disks = await kit.assembly.disks.promised_bytes(of=kit.admission.writing())
        promised = disks + kit.admission.layers_left(without=record.id)
        await asyncio.to_thread(make_folder, needed, promised=promised)

    def make_folder(needed: int, *, promised: int) -> None:
        part = images.begin(name)
        require_room(part, needed, promised=promised)
        kit.assembly.keep_agent(record.id, to=part / AGENT)

    async def save_memory() -> None:
        await runtime.checkpoint(record.id, image=images.part(name) / MEMORY)

    async def save_root() -> None:
        await runtime.save_root(record.id, image=images.part(name) / ROOT)

    steps = [
        Step(
            name="begin",
            do=begin,
            undo=lambda: asyncio.to_thread(images.discard_part if replaces else images.discard, name),
        )
    ]
    if memory:
        steps.append(Step(name="memory", do=save_memory))
    if Capability.FILESYSTEM_CHECKPOINT in runtime.capabilities:
        steps.append(Step(name="root", do=save_root))
    return steps
