"""Pause and resume. A pause is done when its image is whole on disk: until then a failure lets the sandbox run on, from
then on it is paused. A resume keeps the image until someone says that the sandbox answers."""

from __future__ import annotations

import asyncio
import secrets

import structlog

from cpuos.errors import Conflict, CpuosError, PlatformError
from cpuos.node.assembly import RestoreFailed
from cpuos.node.images import MEMORY, ROOT, Manifest, pause_name, root_name
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.node.ledger import facts_of
from cpuos.node.lives import Lives
from cpuos.node.receipts import other_record, policy_to_hold
from cpuos.node.refusals import could_not, incompatible
from cpuos.node.saving import check_room_to_restore, manifest_of, needs, save_steps
from cpuos.node.steps import Step, Together, UndoFailed, run_steps
from cpuos.node.usage import usage_of
from cpuos.runtimes.base import Capability, Process
from cpuos.types.node import NodeResume, Restored, SandboxFacts

__all__ = ["Pausing"]

_NO_THAW = {"thaw": "", "thaw_from": ""}

log = structlog.get_logger("cpuos.node")


class Pausing:
    def __init__(self, kit: Kit, *, lives: Lives) -> None:
        self._kit = kit
        self._ledger = kit.ledger
        self._lives = lives

    async def pause(
        self,
        sandbox_id: str,
        *,
        generation: int,
        freeze: str,
        labels: dict[str, str] | None = None,
        reason: str = "",
    ) -> SandboxFacts:
        """The guest is frozen with `freeze`. After a failure it is so still, and a dial's statement thaws it. `labels`
        are those of its record; `reason` is given where no user asked for it."""
        async with self._ledger.lock(sandbox_id):
            record = self._ledger.held(sandbox_id, generation=generation)
            if record.stage is Stage.PAUSED:
                return facts_of(record)
            record = self._ledger.running(sandbox_id)
            needs(self._kit.runtime_of(record), "pause", sandbox_id)
            record = await self._save(record, freeze=freeze, labels=labels, reason=reason)
            facts = await self._lives.park(record, reason=reason)
        self._ledger.spawn(asyncio.to_thread(self._kit.assembly.images.hash, pause_name(sandbox_id)))
        return facts

    async def resume(self, sandbox_id: str, request: NodeResume) -> SandboxFacts:
        """Its processes are there again, frozen; where they cannot be taken up, or are not asked for, its files alone.
        After a failure it is paused as before."""
        async with self._ledger.lock(sandbox_id):
            record = self._ledger.held(sandbox_id, generation=request.generation)
            if record.stage is Stage.RUNNING:
                return facts_of(record)
            if record.stage is not Stage.PAUSED:
                raise Conflict(f"cannot resume sandbox: {sandbox_id}", f"it is {record.stage}")
            if not record.parked:  # what the pause did not come to
                await self._lives.park(record, reason=record.pause_reason)
            memory, why = request.memory and not record.memory_stale, ""
            if record.memory_stale:
                why = "what was saved of them is older than its files"
            try:
                saved = await self._read(record, memory=memory)
            except Conflict as error:
                if not memory:
                    raise
                log.warning("processes do not fit, files may", sandbox=sandbox_id, why=error.why)
                saved = await self._read(record, memory=False)
                memory, why = False, error.why
            record = await self._check_receipt(record, request)
            await check_room_to_restore(self._kit, saved, verb="resume", sandbox_id=sandbox_id)
            record = record.becomes(Stage.PAUSED, network=policy_to_hold(record.policy, request.network))
            if not memory:
                return await self._take_up(record, saved, restored=Restored.ROOT, why=why)
            try:
                return await self._take_up(record, saved, restored=Restored.MEMORY)
            except CpuosError as error:
                if not saved.root or not (isinstance(error, RestoreFailed) or error.code == "snapshot_damaged"):
                    raise
                log.error("processes not taken up, files are", sandbox=sandbox_id, why=error.why)
                current = self._ledger.held(sandbox_id, generation=request.generation)
                if not current.parked:
                    raise
                return await self._take_up(current, saved, restored=Restored.ROOT, why=error.why)

    async def settle(self, sandbox_id: str, *, generation: int) -> None:
        """It answers: of the image only the root is needed any more, should the sandbox die."""
        async with self._ledger.lock(sandbox_id):
            record = self._ledger.running(sandbox_id, generation=generation)
            if record.unsettled:
                await self._ledger.keep(record.becomes(Stage.RUNNING, unsettled=False, told=False, memory_stale=False))
                if Capability.OWN_KERNEL in self._kit.runtime_of(record).capabilities:  # its layer is on its disk
                    await asyncio.to_thread(self._kit.assembly.images.discard, pause_name(sandbox_id))
                else:
                    await asyncio.to_thread(self._keep_root, sandbox_id)

    def _keep_root(self, sandbox_id: str) -> None:
        images, pause, name = self._kit.assembly.images, pause_name(sandbox_id), root_name(sandbox_id)
        try:
            saved = images.read(pause)
            if saved.root:
                images.link(pause, name, [ROOT])
                images.commit(saved.model_copy(update={"name": name, "freeze": ""}))
        except (CpuosError, OSError):
            log.exception("root not kept", sandbox=sandbox_id)
        images.discard(pause)

    async def repause(self, sandbox_id: str, *, generation: int, frozen: bool = False) -> SandboxFacts:
        """Undo a resume that is not settled. `frozen`: its guest has refused to go on, so its processes' image is as
        new as its files."""
        async with self._ledger.lock(sandbox_id):
            record = self._ledger.held(sandbox_id, generation=generation)
            if record.stage is Stage.PAUSED:
                return facts_of(record)
            record = self._ledger.running(sandbox_id)
            if not record.unsettled:
                raise Conflict(f"cannot pause sandbox again: {sandbox_id}", "its image was given up: it runs")
            reason = "not all of it was there" if frozen else "it did not answer when it was resumed"
            return await self._lives.park(record, reason=reason, frozen=frozen)

    async def _save(self, record: Record, *, freeze: str, labels: dict[str, str] | None, reason: str) -> Record:
        """Make the image. Its last step is what makes the sandbox a paused one."""
        images, name = self._kit.assembly.images, pause_name(record.id)
        runtime = self._kit.runtime_of(record)
        # Whether this comes to its end or not, whoever reaches the guest next has to thaw it, with a key of its own.
        frozen = record.becomes(
            Stage.PAUSING,
            thaw=freeze,
            thaw_from=record.id,
            incarnation=record.incarnation + 1,
            session_key=secrets.token_hex(32),
            unsettled=False,
            told=False,
            memory_stale=False,
            changed_at=self._ledger.clock(),
        )
        used = await usage_of(self._kit, record)  # it stands still already
        paused = frozen.becomes(Stage.PAUSED, process=None, parked=False, pause_reason=reason, used=used, labels=labels)
        manifest = manifest_of(frozen, name=name, runtime=runtime, now=self._ledger.clock())
        steps: list[Step | Together] = [
            Step(
                name="record",
                do=lambda: self._ledger.keep(frozen),
                undo=lambda: self._ledger.keep(frozen.becomes(Stage.RUNNING)),
            ),
            *save_steps(self._kit, frozen, runtime=runtime, name=name, memory=True),
            Step(name="sync", do=lambda: self._kit.assembly.disks.sync(record.id)),
            Step(name="commit", do=lambda: asyncio.to_thread(images.commit, manifest)),
            Step(name="paused", do=lambda: self._ledger.keep(paused)),
        ]
        try:
            await run_steps("pause", steps, checkpoint=self._kit.checkpoint)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, UndoFailed) and error.__cause__ is not None else error
            raise could_not("pause", record.id, cause) from error
        return paused

    async def _check_receipt(self, record: Record, request: NodeResume) -> Record:
        """The record with what is missing, where it may be."""
        missing = [*await self._kit.assembly.receipts.missing(record), *other_record(record, request)]
        if missing and not request.incomplete:
            what = f"cannot resume sandbox: {record.id}"
            why = f"not there: {', '.join(missing)}"
            raise Conflict(what, why, code="restore_incomplete", details={"missing": missing})
        return record.becomes(Stage.PAUSED, missing=missing)

    def _check_room(self, record: Record) -> None:
        self._kit.admission.require(f"cannot resume sandbox: {record.id}", record.request, restarts=True)

    async def _read(self, record: Record, *, memory: bool) -> Manifest:
        """The image's manifest, once it is proved to be good and to fit."""
        saved = await asyncio.to_thread(self._kit.assembly.images.read, pause_name(record.id))
        what = f"cannot resume sandbox: {record.id}"
        if (saved.sandbox, saved.generation) != (record.id, record.generation):
            raise PlatformError(what, "its image is that of another one", code="snapshot_damaged")
        has_template = self._kit.templates.has(record.request.template, digest=saved.template_digest)
        if memory:
            incompatible(what, saved, has_template=has_template, runtime=self._kit.runtime_of(record))
        elif not (saved.root and has_template):
            raise Conflict(what, "its files were not saved apart from its processes", code="snapshot_incompatible")
        return saved

    async def _take_up(self, paused: Record, saved: Manifest, *, restored: Restored, why: str = "") -> SandboxFacts:
        """`why`: no more than this is taken up."""
        images, name, now = self._kit.assembly.images, pause_name(paused.id), self._ledger.clock()
        runtime = self._kit.runtime_of(paused)
        # Processes that begin anew are not frozen.
        thaw = {"thaw": saved.freeze, "thaw_from": saved.sandbox} if restored is Restored.MEMORY else _NO_THAW
        record = paused.becomes(
            Stage.RESUMING,
            boot_id=self._kit.boot_id,
            incarnation=paused.incarnation + 1,
            session_key=secrets.token_hex(32),
            parked=False,
            unsettled=True,
            pause_reason=why,
            restored=restored,
            restored_at=saved.created_at,
            changed_at=now,
            **thaw,
        )

        async def started(process: Process) -> None:
            nonlocal record
            record = record.becomes(Stage.RUNNING, process=process, started_at=self._ledger.clock())

        self._check_room(record)
        self._ledger.begin(record)  # from here on it takes room

        # The incarnation stays counted: a number once given is never given to another key.
        back = paused.becomes(Stage.PAUSED, incarnation=record.incarnation, missing=[])

        async def undo() -> None:
            await self._ledger.keep(back)
            await self._lives.parked(back)  # a disk that was mounted is not as it was

        folder = MEMORY if restored is Restored.MEMORY else ROOT
        begin, spec = {folder: images.path(name) / folder}, self._kit.spec_of(record)
        steps: list[Step | Together] = [
            Step(name="record", do=lambda: self._ledger.keep(record), undo=undo),
            Together(steps=self._kit.assembly.unpark_steps(spec, network=record.policy)),
            Together(
                steps=[
                    self._kit.assembly.start_step(spec, runtime, started=started, **begin),
                    # The guest is frozen until this too has ended.
                    Step(name="check", do=lambda: asyncio.to_thread(images.check, name, folders=[folder])),
                ]
            ),
            Step(name="running", do=lambda: self._ledger.keep(record)),
        ]
        try:
            await run_steps("resume", steps, checkpoint=self._kit.checkpoint)
        except Exception as error:
            cause = error
            if isinstance(error, UndoFailed):
                await self._ledger.keep(back.becomes(Stage.PAUSED, parked=False))
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise could_not("resume", record.id, cause) from error
        log.info("sandbox resumed", sandbox=record.id, generation=record.generation, incarnation=record.incarnation)
        return self._lives.begin(record, runtime)
