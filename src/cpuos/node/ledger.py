"""All records of the node, in memory and in the journal; the locks that guard them; the feed that tells of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any
from weakref import WeakValueDictionary

from cpuos.errors import Conflict, SandboxGone, Unavailable
from cpuos.node.changes import ChangeFeed
from cpuos.node.journal import Journal, Record, Stage
from cpuos.node.refusals import sandbox_not_found, stale_generation
from cpuos.types.node import SandboxFacts

__all__ = ["Ledger", "facts_of"]

_ALIVE = frozenset({Stage.RUNNING, Stage.SAVING, Stage.PAUSING, Stage.PAUSED, Stage.RESUMING})


class Ledger:
    """It runs on one loop; the lock of a sandbox guards its record and its parts."""

    def __init__(self, journal: Journal, *, clock: Callable[[], datetime]) -> None:
        self._journal = journal
        self.clock = clock
        self.changes = ChangeFeed()
        self._records: dict[str, Record] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Each as long as somebody holds it or waits for it: dropped by hand, it would be two."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self) -> list[Record]:
        loaded = await asyncio.to_thread(self._journal.load)
        self._records.update((record.id, record) for record in loaded.records)
        return loaded.records

    def find(self, sandbox_id: str) -> Record | None:
        return self._records.get(sandbox_id)

    def all(self) -> list[Record]:
        return list(self._records.values())

    def begin(self, record: Record) -> None:
        """In memory only: the first step of its create writes it."""
        self._records[record.id] = record

    async def keep(self, record: Record, *, sync: bool = True) -> None:
        """In the journal first, then in memory."""
        if sync:
            await asyncio.to_thread(self._journal.write, record)
        else:
            self._journal.write(record, sync=False)  # into the page cache: a thread would take longer
        self._records[record.id] = record

    async def forget(self, sandbox_id: str) -> None:
        await asyncio.to_thread(self._journal.remove, sandbox_id)
        self._records.pop(sandbox_id, None)

    def gone(self, record: Record) -> Record:
        """What stays of a deleted one: a mark that refuses late repeats of its create."""
        return record.becomes(
            Stage.GONE, ended=True, changed_at=self.clock(), session_key="", thaw="", process=None, parked=False
        )

    def lock(self, sandbox_id: str) -> asyncio.Lock:
        return self._locks.setdefault(sandbox_id, asyncio.Lock())

    def publish(self, record: Record) -> SandboxFacts:
        facts = facts_of(record)
        self.changes.publish(facts)
        return facts

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def whole(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In a task of its own: a caller that hangs up does not leave it half done."""
        return await asyncio.shield(self.spawn(work))

    async def finish(self) -> None:
        """Return when all that goes on has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def held(self, sandbox_id: str, *, generation: int) -> Record:
        """The record of one that is alive, paused or not, and of this generation."""
        record = self._records.get(sandbox_id)
        if record is None or record.stage in (Stage.GONE, Stage.READY):
            raise sandbox_not_found(sandbox_id)
        if record.stage in (Stage.DEAD, Stage.DELETING):
            raise SandboxGone(f"cannot reach sandbox: {sandbox_id}", record.exit_reason)
        if record.stage is Stage.CREATING:
            raise Conflict(f"cannot reach sandbox: {sandbox_id}", "it is still being created")
        if generation != record.generation:
            raise stale_generation(sandbox_id, asked=generation, known=record.generation)
        return record

    def dead(self, sandbox_id: str, *, generation: int) -> Record | None:
        """The record of one that died, of which nothing but files is here."""
        record = self._records.get(sandbox_id)
        if record is None or record.stage is not Stage.DEAD or not record.ended or record.generation != generation:
            return None
        return record

    def running(self, sandbox_id: str, *, generation: int | None = None) -> Record:
        """The record of one whose processes are there and may go on."""
        known = self._records.get(sandbox_id)
        record = self.held(sandbox_id, generation=generation or (known.generation if known is not None else 0))
        if record.stage is not Stage.RUNNING:
            raise Unavailable(f"cannot reach sandbox: {sandbox_id}", f"it is {record.stage}", code="sandbox_paused")
        return record

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller; one that went away leaves nobody to ask


def facts_of(record: Record) -> SandboxFacts:
    return SandboxFacts(
        id=record.id,
        generation=record.generation,
        alive=record.stage in _ALIVE,
        started_from=record.started_from,
        exit_reason=record.exit_reason,
        paused=record.stage in (Stage.PAUSED, Stage.RESUMING),
        pause_reason=record.pause_reason,
        paused_at=record.changed_at if record.stage is Stage.PAUSED else None,
        settled=not record.unsettled,
        incarnation=record.incarnation,
        restored=record.restored,
        restored_at=record.restored_at,
        missing=record.missing,
        runtime=record.request.runtime,
        isolation=record.isolation,
        isolation_detail=record.isolation_detail,
        template=record.request.template,
        template_digest=record.template_digest,
        started_at=record.started_at,
    )
