"""Snapshots: what a sandbox is at one moment, kept apart from it, for any number of others to begin with."""

from __future__ import annotations

import asyncio
import secrets

import structlog

from cpuos.errors import Conflict, InvalidRequest
from cpuos.node.images import AGENT, DISK, MEMORY, ROOT, Manifest, pause_name, root_name
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.node.refusals import could_not
from cpuos.node.saving import manifest_of, needs, save_steps
from cpuos.node.steps import Step, UndoFailed, run_steps
from cpuos.runtimes.base import Capability, Runtime
from cpuos.types.node import NodeSnapshotCreate, SnapshotFacts

__all__ = ["Snapshots"]

log = structlog.get_logger("cpuos.node")


class Snapshots:
    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._ledger = kit.ledger
        self._images = kit.assembly.images

    async def make(self, sandbox_id: str, request: NodeSnapshotCreate) -> SnapshotFacts:
        """Of one that is frozen, which a dial's statement thaws then whatever came of it; of one that runs, where only
        files are asked for; of a paused one; or of what is left of one that died. A repeat answers the same."""
        async with self._ledger.lock(sandbox_id), self._ledger.lock(_key(request.snapshot)):
            dead = self._ledger.dead(sandbox_id, generation=request.generation)
            record = dead or self._ledger.held(sandbox_id, generation=request.generation)
            known = await self._known(request.snapshot, of=record)
            if known is not None:
                return known
            if dead is not None:
                await self._copy_dead(dead, request)
            elif record.stage is Stage.PAUSED:
                await self._copy_paused(record, request)
            else:
                await self._save(self._ledger.running(sandbox_id), request)
        self._ledger.spawn(asyncio.to_thread(self._images.hash, request.snapshot))
        log.info("snapshot made", sandbox=sandbox_id, snapshot=request.snapshot, memory=request.memory)
        return await asyncio.to_thread(self._facts, request.snapshot)

    async def keep_root_of(self, record: Record) -> None:
        """As `keep_root`, of the one that a look at it found."""
        await self.keep_root(record.id, generation=record.generation)

    async def keep_root(self, sandbox_id: str, *, generation: int) -> None:
        """Save the root of one that runs, as of now: should it die, this is what is left of it beside its disk."""
        async with self._ledger.lock(sandbox_id):
            self._ledger.held(sandbox_id, generation=generation)
            record = self._ledger.running(sandbox_id)
            runtime, name = self._kit.runtime_of(record), root_name(sandbox_id)
            needs(runtime, "keep the root of", sandbox_id, Capability.FILESYSTEM_CHECKPOINT)
            manifest = manifest_of(record, name=name, runtime=runtime, now=self._ledger.clock(), freeze="")
            steps = [
                *save_steps(self._kit, record, runtime=runtime, name=name, memory=False, replaces=True),
                Step(name="commit", do=lambda: asyncio.to_thread(self._images.commit, manifest)),
            ]
            await self._in_steps(record, steps)

    async def list(self) -> list[SnapshotFacts]:
        """All that are whole and this node's; pauses are not among them."""
        return await asyncio.to_thread(self._list)

    async def delete(self, snapshot: str) -> None:
        """Idempotent."""
        async with self._ledger.lock(_key(snapshot)):
            self._images.check_unread(snapshot)
            await asyncio.to_thread(self._images.discard, snapshot)

    async def _known(self, snapshot: str, *, of: Record) -> SnapshotFacts | None:
        if not await asyncio.to_thread(self._images.has, snapshot):
            return None
        facts = await asyncio.to_thread(self._facts, snapshot)
        if (facts.sandbox, facts.generation) != (of.id, of.generation):
            raise Conflict(f"cannot make snapshot: {snapshot}", f"there is one of that id, of sandbox {facts.sandbox}")
        return facts

    async def _save(self, record: Record, request: NodeSnapshotCreate) -> None:
        runtime = self._kit.runtime_of(record)
        if request.memory:
            needs(runtime, "save", record.id)
        if request.freeze is None and (request.memory or Capability.OWN_KERNEL in runtime.capabilities):
            why = "its processes, and the disks of a kernel of its own, are saved only while they are frozen"
            raise InvalidRequest(f"cannot save sandbox: {record.id}", why)
        saving = record.becomes(Stage.SAVING, changed_at=self._ledger.clock())
        if request.freeze is not None:
            saving = saving.becomes(
                Stage.SAVING,
                thaw=request.freeze,
                thaw_from=record.id,
                incarnation=record.incarnation + 1,
                session_key=secrets.token_hex(32),
            )

        async def go_on() -> None:
            await self._ledger.keep(saving.becomes(Stage.RUNNING))

        manifest = manifest_of(
            saving,
            name=request.snapshot,
            runtime=runtime,
            now=self._ledger.clock(),
            freeze=request.freeze if request.memory else "",
        )
        steps = [
            Step(name="record", do=lambda: self._ledger.keep(saving), undo=go_on),
            *save_steps(self._kit, record, runtime=runtime, name=request.snapshot, memory=request.memory),
            # After the memory: what that knows to be written is on the disk.
            self._disk_step(record, request.snapshot),
            Step(name="commit", do=lambda: asyncio.to_thread(self._images.commit, manifest)),
            Step(name="running", do=go_on),
        ]
        await self._in_steps(record, steps)
        current = self._ledger.find(record.id)
        if current is not None:
            self._ledger.publish(current)

    async def _copy_paused(self, record: Record, request: NodeSnapshotCreate) -> None:
        saved = await asyncio.to_thread(self._images.read, pause_name(record.id))
        memory = request.memory and saved.memory
        manifest = saved.model_copy(update={"name": request.snapshot, "freeze": saved.freeze if memory else ""})
        await self._copy(record, manifest, of=saved.name, folders=[AGENT, ROOT, *([MEMORY] if memory else [])])

    async def _copy_dead(self, record: Record, request: NodeSnapshotCreate) -> None:
        if request.memory:
            raise InvalidRequest(f"cannot save sandbox: {record.id}", "it died, and its processes with it")
        name, now, runtime = root_name(record.id), self._ledger.clock(), self._kit.runtime_of(record)
        manifest = manifest_of(record, name=request.snapshot, runtime=runtime, now=now, freeze="")
        if Capability.OWN_KERNEL in runtime.capabilities:  # its layer is as it was when it died
            manifest = manifest.model_copy(update={"root_at": record.changed_at})
            await self._copy(record, manifest, of=name, folders=[], dead=runtime)
            return
        if await asyncio.to_thread(self._images.has, name):
            saved = await asyncio.to_thread(self._images.read, name)
            manifest = manifest.model_copy(update={"root_at": saved.created_at})
        await self._copy(record, manifest, of=name, folders=[ROOT], leave=True)

    async def _copy(
        self,
        record: Record,
        manifest: Manifest,
        *,
        of: str,
        folders: list[str],
        leave: bool = False,
        dead: Runtime | None = None,
    ) -> None:
        """The files of an image are never changed: they get a second name; with `leave` the disk too. `dead`: whose the
        disk was, with the root's layer on it."""
        name, assembly = manifest.name, self._kit.assembly

        async def save_root() -> None:
            if dead is not None:
                await dead.save_dead_root(assembly.disks.path(record.id), image=self._images.part(name) / ROOT)

        steps = [
            Step(
                name="begin",
                do=lambda: asyncio.to_thread(self._images.link, of, name, folders),
                undo=lambda: asyncio.to_thread(self._images.discard, name),
            ),
            *([Step(name="root", do=save_root)] if dead is not None else []),
            self._disk_step(record, name, leave=leave or dead is not None),
            Step(name="commit", do=lambda: asyncio.to_thread(self._images.commit, manifest)),
        ]
        await self._in_steps(record, steps)

    def _disk_step(self, record: Record, snapshot: str, *, leave: bool = False) -> Step:
        disks = self._kit.assembly.disks

        async def copy() -> None:
            await (disks.leave if leave else disks.copy)(record.id, to=self._images.part(snapshot) / DISK)

        return Step(name="disk", do=copy)

    async def _in_steps(self, record: Record, steps: list[Step]) -> None:
        try:
            await run_steps("snapshot", steps, checkpoint=self._kit.checkpoint)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, UndoFailed) and error.__cause__ is not None else error
            raise could_not("save", record.id, cause) from error

    def _list(self) -> list[SnapshotFacts]:
        found = []
        for name in self._images.list():
            try:
                if "-" not in name:
                    found.append(self._facts(name))
            except Exception:  # it goes in this moment, or is damaged: whoever asks for it by name is told
                continue
        return found

    def _facts(self, name: str) -> SnapshotFacts:
        saved = self._images.read(name)
        return _facts_of(saved, size_bytes=self._images.size_bytes(saved))


def _key(snapshot: str) -> str:
    """Of its lock: apart from those of sandboxes."""
    return f"snapshot {snapshot}"


def _facts_of(saved: Manifest, *, size_bytes: int) -> SnapshotFacts:
    return SnapshotFacts(
        id=saved.name,
        sandbox=saved.sandbox,
        generation=saved.generation,
        incarnation=saved.incarnation,
        memory=saved.memory,
        root=saved.root,
        size_bytes=size_bytes,
        template=saved.template,
        template_digest=saved.template_digest,
        runtime=saved.runtime,
        runtime_version=saved.runtime_version,
        cpu=saved.cpu,
        memory_mib=saved.memory_mib,
        disk_mib=saved.disk_mib,
        max_processes=saved.max_processes,
        created_at=saved.created_at,
        root_at=(saved.root_at or saved.created_at) if saved.root else None,
    )
