"""The daemon's start and its rounds: host and journal agree again, however the last daemon ended."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from pathlib import Path

import structlog

from cpuos.errors import CpuosError
from cpuos.node.garbage import GRACE, Garbage
from cpuos.node.images import pause_name
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.node.lives import Lives
from cpuos.node.recovery import Recovery, decide
from cpuos.node.steps import run_steps
from cpuos.runtimes.base import Runtime
from cpuos.types.sandbox import HOST_RESTARTED

__all__ = ["GONE_KEPT", "Upkeep"]

log = structlog.get_logger("cpuos.node")

SWEEP_S = 5.0
# How long a deleted sandbox's mark refuses late repeats of its create: far over every time limit of a call.
GONE_KEPT = timedelta(hours=1)
_ROUNDS_OF_GARBAGE = 12
_IN_BETWEEN = (Stage.SAVING, Stage.PAUSING, Stage.RESUMING)


class Upkeep:
    def __init__(self, kit: Kit, *, lives: Lives) -> None:
        self._kit = kit
        self._ledger = kit.ledger
        self._lives = lives
        self._sweeper: asyncio.Task[None] | None = None
        self._garbage = Garbage(kit.volume.folder, clock=kit.ledger.clock, checkpoint=kit.checkpoint)

    async def recover(self) -> None:
        """Runs before any call is taken."""
        await self._kit.assembly.slots.start()
        await asyncio.to_thread(self._kit.assembly.images.sweep)
        await asyncio.gather(*(self._recover(record) for record in await self._ledger.load()))
        await self._remove_orphans()
        await self._begin_templates()
        await asyncio.to_thread(self._garbage.empty)
        await self.collect()

    def start(self) -> None:
        """Begin to try again, now and then, what could not be done."""
        self._ledger.spawn(asyncio.to_thread(self._finish_images))
        for record in self._ledger.all():
            if record.stage is Stage.PAUSED and record.parked:
                self._ledger.spawn(self._kit.assembly.receipts.note(record))
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep_for_ever(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()
            rounds += 1
            if rounds % _ROUNDS_OF_GARBAGE == 0:
                await self.collect()

    async def sweep(self) -> None:
        """One round: what could not be taken up at the start, what is dead, paused or being deleted and still has parts
        here, marks that are old, and orphans: a start of this daemon's forerunner may have ended after `recover`
        looked."""
        oldest = self._ledger.clock() - GONE_KEPT
        for record in self._ledger.all():
            if self._ledger.lock(record.id).locked():
                continue
            if record.stage is Stage.GONE and record.changed_at < oldest:
                await self._ledger.forget(record.id)
            elif self._is_unattended(record):
                await self._recover(record)
            elif record.stage is Stage.DELETING or (record.stage is Stage.DEAD and not record.ended):
                async with self._ledger.lock(record.id):
                    await self._finish(record)
        await self._remove_orphans()

    def _is_unattended(self, record: Record) -> bool:
        """Nobody watches it though it runs, or a verb has left it in between."""
        if record.stage in (Stage.RUNNING, Stage.READY):
            return not self._lives.is_watched(record.id)
        return record.stage in _IN_BETWEEN or (record.stage is Stage.PAUSED and not record.parked)

    async def _finish(self, record: Record) -> None:
        try:
            if record.stage is Stage.DELETING:
                await self._lives.remove(record)
            else:
                await self._lives.end(record, reason="")
        except CpuosError:
            log.exception("sandbox not removed yet", sandbox=record.id)

    async def _recover(self, record: Record) -> None:
        has_image = await asyncio.to_thread(self._kit.assembly.images.has, pause_name(record.id))
        decision = decide(record, boot_id=self._kit.boot_id, has_image=has_image)
        log.info("sandbox found", sandbox=record.id, generation=record.generation, decision=decision)
        try:
            async with self._ledger.lock(record.id):
                if self._ledger.find(record.id) is record:
                    await self._do(decision, record, has_image=has_image)
        except Exception:
            log.exception("sandbox not recovered yet", sandbox=record.id)
            if decision is Recovery.UNDO:
                await self._ledger.keep(record.becomes(Stage.DELETING, exit_reason="its create failed"))

    async def _do(self, decision: Recovery, record: Record, *, has_image: bool) -> None:
        runtime = self._kit.runtimes.find(record.request.runtime)
        if decision is Recovery.ADOPT:
            if not (lacking := await self._adopt(record, runtime)):
                begin = self._lives.watch if record.stage is Stage.READY else self._lives.begin
                begin(record, self._kit.runtime_of(record))
            elif record.stage is Stage.READY:
                await self._lives.give_up(record)
            else:
                record = record.becomes(record.stage, unsettled=record.unsettled and has_image)
                await self._lives.end_or_park(record, reason=lacking)
        elif decision is Recovery.REVERT:
            await self._revert(record, runtime, has_image=has_image)
        elif decision is Recovery.PARK:
            await self._lives.park(record, reason=record.pause_reason)
        elif decision is Recovery.END:
            reason = HOST_RESTARTED if record.boot_id != self._kit.boot_id else "its process is gone"
            await self._lives.end(record, reason=reason)
        elif decision is Recovery.DELETE:
            await self._lives.remove(record)
        elif decision is Recovery.UNDO:
            await run_steps("undo", self._kit.end_steps(record), checkpoint=self._kit.checkpoint)
            await self._ledger.forget(record.id)

    async def _revert(self, record: Record, runtime: Runtime | None, *, has_image: bool) -> None:
        """What was begun for a snapshot or pause is not finished: the sandbox runs on, if it still does."""
        images, pausing = self._kit.assembly.images, record.stage is Stage.PAUSING
        await self._kit.assembly.disks.thaw(record.id)
        if not (lacking := await self._adopt(record, runtime)):
            if pausing:
                await asyncio.to_thread(images.discard, pause_name(record.id))
            record = record.becomes(Stage.RUNNING)
            await self._ledger.keep(record)
            self._lives.begin(record, self._kit.runtime_of(record))
        elif pausing and has_image:
            await self._lives.park(record)
        else:
            await self._lives.end(record, reason=lacking)

    async def _adopt(self, record: Record, runtime: Runtime | None) -> str:
        return await self._kit.adopt(record, runtime) if runtime is not None else "its runtime is not there any more"

    async def collect(self, *, at_once: bool = False) -> None:
        """Remove what nothing needs, and has not needed for a while; `at_once`: also what has just become so."""
        unneeded = await self.unneeded()
        ripe = await asyncio.to_thread(self._garbage.mark, unneeded, grace=timedelta() if at_once else GRACE)
        # A create takes its template and writes its record without letting anyone else in between: so does this.
        taken = set(self._kit.templates.unneeded(self._digests_of_records()))
        for path in ripe:
            if path in taken or path.name.startswith("."):
                self._garbage.move(path)
        await asyncio.to_thread(self._garbage.empty)

    async def _begin_templates(self) -> None:
        used = self._digests_of_records()
        with contextlib.suppress(CpuosError):  # what a damaged image was begun with nobody takes up
            used |= await asyncio.to_thread(self._digests_of_images)
        self._kit.templates.begin(used)

    async def unneeded(self) -> list[Path]:
        """Images of templates that no sandbox and no image was begun with."""
        needed = self._digests_of_records()  # before the images: what is saved meanwhile has a record still
        try:
            needed |= await asyncio.to_thread(self._digests_of_images)
        except CpuosError:
            return []  # what a damaged image needs nobody knows
        return self._kit.templates.unneeded(needed)

    def _digests_of_records(self) -> set[str]:
        return {record.template_digest for record in self._ledger.all() if record.stage is not Stage.GONE}

    def _digests_of_images(self) -> set[str]:
        images = self._kit.assembly.images
        return {images.read(name).template_digest for name in images.list()}

    def _finish_images(self) -> None:
        """Digests that the last daemon did not come to."""
        for name in self._kit.assembly.images.list():
            self._kit.assembly.images.hash(name)

    async def _remove_orphans(self) -> None:
        """What is on the host under this instance's names and no record owns."""
        for sandbox_id in sorted(await self._kit.assembly.leftovers()):
            lock = self._ledger.lock(sandbox_id)
            if lock.locked():
                continue  # a verb is at it
            # The next generation of one that was deleted has its name: what is made meanwhile waits, or is known here.
            async with lock:
                record = self._ledger.find(sandbox_id)
                if record is None or record.stage is Stage.GONE:
                    await self._remove_orphan(sandbox_id)

    async def _remove_orphan(self, sandbox_id: str) -> None:
        log.warning("orphan found", sandbox=sandbox_id)
        try:
            steps = self._kit.assembly.end_steps(sandbox_id, runtimes=list(self._kit.runtimes))
            await run_steps("orphan", steps, checkpoint=self._kit.checkpoint)
        except Exception:
            log.exception("orphan not removed", sandbox=sandbox_id)
