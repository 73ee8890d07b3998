"""A sandbox's process is watched; when it ends the sandbox is dead, or paused as before it was taken up. What is left
on the host goes then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.node.ledger import facts_of
from cpuos.node.refusals import could_not
from cpuos.node.steps import Step, run_steps
from cpuos.node.usage import usage_of
from cpuos.runtimes.base import Runtime
from cpuos.types.node import SandboxFacts

__all__ = ["Lives"]

log = structlog.get_logger("cpuos.node")

WATCH_RETRY_S = 1.0


class Lives:
    """The caller of each verb holds the sandbox's lock."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._ledger = kit.ledger
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._tell_given_up: Callable[[str], None] = lambda sandbox_id: None

    def on_given_up(self, tell: Callable[[str], None]) -> None:
        """`tell` hears of each that was ready and is not there any more."""
        self._tell_given_up = tell

    def begin(self, record: Record, runtime: Runtime) -> SandboxFacts:
        """Its process runs: watch it, and tell."""
        self.watch(record, runtime)
        return self._ledger.publish(record)

    def watch(self, record: Record, runtime: Runtime) -> None:
        """As `begin`, of one that nobody knows yet."""
        self.unwatch(record.id)
        self._watches[record.id] = self._ledger.spawn(self._watch(record, runtime))

    def is_watched(self, sandbox_id: str) -> bool:
        return sandbox_id in self._watches

    def unwatch(self, sandbox_id: str) -> None:
        watch = self._watches.pop(sandbox_id, None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()

    async def close(self) -> None:
        """Sandboxes live on unwatched."""
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def end(self, record: Record, *, reason: str) -> None:
        """Report the death first, then take away what is left on the host but its files: a snapshot can be made of
        them until it is deleted."""
        record = record.becomes(Stage.DEAD, exit_reason=record.exit_reason or reason, changed_at=self._ledger.clock())
        await self._ledger.keep(record)
        self._ledger.publish(record)
        log.warning("sandbox died", sandbox=record.id, generation=record.generation, reason=record.exit_reason)
        try:
            await run_steps("end", self._kit.end_steps(record, keep_disk=True), checkpoint=self._kit.checkpoint)
            await self._ledger.keep(record.becomes(Stage.DEAD, ended=True))
        except Exception:
            log.exception("sandbox not cleaned yet", sandbox=record.id)

    async def end_or_park(self, record: Record, *, reason: str) -> None:
        """Its process is gone. One that was taken up, and of which nobody has said that it answers, is paused again."""
        if record.unsettled:
            await self.park(record, reason=reason)
        else:
            await self.end(record, reason=reason)

    async def park(self, record: Record, *, reason: str = "", frozen: bool = False) -> SandboxFacts:
        """Its image is whole: it is paused from here on, and all but files is taken away, now or by the sweeper.
        `frozen`: its guest is known not to have gone on."""
        self.unwatch(record.id)
        used = await usage_of(self._kit, record)
        now = self._ledger.clock()
        record = record.becomes(
            Stage.PAUSED,
            used=used,
            process=None,
            parked=False,
            unsettled=False,
            told=False,
            memory_stale=record.memory_stale or (record.told and not frozen),
            disk_mark="",
            missing=[],
            pause_reason=reason,
            changed_at=now,
        )
        await self._ledger.keep(record)
        facts = self._ledger.publish(record)
        log.info("sandbox paused", sandbox=record.id, generation=record.generation, reason=reason)
        try:
            steps = self._kit.assembly.park_steps(record.id, runtime=self._kit.runtime_of(record))
            await run_steps("park", steps, checkpoint=self._kit.checkpoint)
            await self.parked(record)
        except Exception:
            log.exception("paused sandbox not parked yet", sandbox=record.id)
        return facts

    async def parked(self, record: Record) -> None:
        """Only files of it are left: write down by what a change of its disk is seen, and have the digest made."""
        mark = await self._kit.assembly.disks.mark(record.id)
        record = record.becomes(Stage.PAUSED, parked=True, disk_mark=mark)
        await self._ledger.keep(record)
        self._ledger.spawn(self._kit.assembly.receipts.note(record))

    async def give_up(self, record: Record) -> None:
        """One that was ready goes without a trace: nobody has heard of it."""
        self.unwatch(record.id)
        # In memory alone: a daemon that finds the record of before does the same.
        self._ledger.begin(record.becomes(Stage.DELETING, exit_reason="nobody has taken it"))
        steps = [
            *self._kit.end_steps(record),
            Step(name="forget", do=lambda: self._ledger.forget(record.id)),
        ]
        try:
            await run_steps("give-up", steps, checkpoint=self._kit.checkpoint)
        except Exception:
            log.exception("ready sandbox not removed yet", sandbox=record.id)
        self._tell_given_up(record.id)

    async def remove(self, record: Record) -> None:
        was_ready = record.stage is Stage.READY
        record = record.becomes(
            Stage.DELETING, exit_reason=record.exit_reason or "it was deleted", changed_at=self._ledger.clock()
        )
        self.unwatch(record.id)
        steps = [
            Step(name="record", do=lambda: self._ledger.keep(record)),
            *self._kit.end_steps(record),
            Step(name="gone", do=lambda: self._ledger.keep(self._ledger.gone(record))),
        ]
        try:
            await run_steps("delete", steps, checkpoint=self._kit.checkpoint)
        except Exception as error:
            raise could_not("delete", record.id, error) from error
        self._ledger.changes.publish(facts_of(record))
        if was_ready:
            self._tell_given_up(record.id)
        log.info("sandbox deleted", sandbox=record.id, generation=record.generation)

    async def _watch(self, record: Record, runtime: Runtime) -> None:
        while True:
            try:
                reason = await runtime.wait(record.id)
                break
            except Exception:
                log.exception("watch failed", sandbox=record.id)
                await asyncio.sleep(WATCH_RETRY_S)
                if reason := await self._kit.adopt(record, runtime):
                    break
        async with self._ledger.lock(record.id):
            current = self._ledger.find(record.id)
            if current is None or current.process != record.process:
                return
            if current.stage is Stage.READY:
                await self.give_up(current)
            elif current.stage is Stage.RUNNING:
                await self.end_or_park(current, reason=reason)
