"""The pool of ready sandboxes: what is in it, who takes from it, and who hears of that.

A ready sandbox is an ordinary one that nobody has asked for yet. It has a record of stage READY, and all that is its
own: id, host name, disk, network slot, session key. Its slot lets nothing through, and nobody has told its agent who it
is. The create that names its id makes it the caller's: one write of its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import structlog

from cpuos.errors import CpuosError
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.node.lives import Lives
from cpuos.node.pool.filling import Filling
from cpuos.node.pool.keeper import SETTLE_S, Keeper, Plan, make_plan, room_under
from cpuos.node.pool.pressure import Pressure, read_pressure
from cpuos.node.pool.shape import Shape, is_for_anyone, shape_of, shape_of_record
from cpuos.node.pool.wishes import Wishes
from cpuos.node.steps import Step, Together, UndoFailed, run_steps
from cpuos.types.node import NodeSandboxCreate, PoolFacts, ReadySandbox
from cpuos.types.sandbox import SandboxCreate, StartedFrom

__all__ = ["Pool", "PoolLimits"]

log = structlog.get_logger("cpuos.node")

# Of an idle sandbox, until some were measured.
_UNIT_BYTES = 64 << 20
_CLOSE_S = 4.0
SNAPSHOT_LASTS_S = 5.0
NEWS_S = 0.03
TAKEN_S = 0.25
"""So much later is it told that one was taken: who took it knows, and of a burst of creates one word is told."""


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    memory_mib: int = 0
    """What ready sandboxes may take together; 0: there are none."""
    volume: Path = Path("/")
    """Any folder of the data volume."""
    keep: Sequence[tuple[SandboxCreate, int]] = ()
    """So many of a kind, whether anyone asks or not."""
    runtime: str = ""
    """Of those."""
    max_age: timedelta = timedelta(hours=1)
    """An older one is replaced."""
    settle_s: float = SETTLE_S


class Pool:
    """On the node's one loop. Creates take; a keeper fills and discards."""

    def __init__(
        self,
        kit: Kit,
        *,
        lives: Lives,
        limits: PoolLimits,
        pressure: Callable[[Path], Pressure] = read_pressure,
    ) -> None:
        self._kit = kit
        self._ledger = kit.ledger
        self._lives = lives
        self._limits = limits
        self._pressure = pressure
        self._filling = Filling(kit, lives=lives)
        self._wishes = Wishes(clock=time.monotonic)
        self._keeper = Keeper(plan=self._plan, fill=self.fill, discard=self.discard, settle_s=limits.settle_s)
        self._bytes: dict[str, int] = {}
        """What each of those that are ready took when it was."""
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._taking: dict[str, Record] = {}
        self._seen: dict[str, float] = {}
        """When a snapshot was first asked for."""
        self._seq = int(time.time() * 1e6)
        self._changed = asyncio.Event()
        self._telling: asyncio.TimerHandle | None = None
        self._closed = False
        self._taken = self._missed = self._filled = 0
        lives.on_given_up(self._given_up)

    @property
    def is_on(self) -> bool:
        return self._limits.memory_mib > 0

    # its life

    def start(self) -> None:
        if self.is_on or self.ready():
            self._keeper.start()

    def stop(self) -> None:
        """Let those who wait for news go."""
        self._closed = True
        self._tell()

    async def close(self) -> None:
        """Nothing is ready any more; what does not go in time goes when a daemon starts again."""
        await self._keeper.close()
        ready = [self._ledger.spawn(self.discard(record)) for record in self.ready()]
        if ready:
            await asyncio.wait(ready, timeout=_CLOSE_S)

    # what there is

    def ready(self) -> list[Record]:
        return [record for record in self._ledger.all() if record.stage is Stage.READY]

    def facts(self) -> PoolFacts:
        ready = self.ready()
        return PoolFacts(
            seq=self._seq,
            ready=[_told(record) for record in ready],
            memory_mib=self._held_bytes(ready) >> 20,
            budget_mib=self._limits.memory_mib,
            filled=self._filled,
            taken=self._taken,
            missed=self._missed,
        )

    async def after(self, seq: int, *, wait_s: float) -> PoolFacts:
        """What there is, once that is not what was told under this number any more, or the time is up."""
        if seq == self._seq and wait_s > 0 and not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
                    await asyncio.sleep(NEWS_S)
        return self.facts()

    # taking

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A create or resume goes on: that comes first."""
        self._keeper.begin_work()
        try:
            yield
        finally:
            self._keeper.end_work()

    async def gone(self, sandbox_id: str) -> None:
        """Return when nothing is under way that takes this one out of the pool: then it is in it, or not known."""
        leaving = self._leaving.get(sandbox_id)
        if leaving is not None:
            await asyncio.wait([leaving])

    async def claim(self, request: NodeSandboxCreate, *, digest: str) -> Record | None:
        """The ready one of this id, if it fits; from here on nobody else has it. One that does not fit goes."""
        shape = shape_of(request, digest=digest)
        if self.is_on and is_for_anyone(request):
            self._wishes.note(shape)  # the keeper looks when the create is over
        record = self._ledger.find(request.id)
        if record is None or record.stage is not Stage.READY:
            self._missed += is_for_anyone(request)
            return None
        if not is_for_anyone(request) or shape_of_record(record) != shape:
            await self.discard(record)
            return None
        self._taking[record.id] = record
        self._ledger.begin(record.becomes(Stage.CREATING))
        self._tell_later()
        return record

    async def take(self, ready: Record, request: NodeSandboxCreate) -> Record:
        """Make it the caller's. The caller holds its lock. After a failure nothing of it is left."""
        now = self._ledger.clock()
        taken = ready.becomes(
            Stage.RUNNING, request=request, changed_at=now, started_at=now, started_from=StartedFrom.POOL
        )
        # By the record it is the caller's. A daemon that finds it puts the policy of its record in force, old or new.
        recorded = Step(
            name="record", do=lambda: self._ledger.keep(taken, sync=False), undo=lambda: self._remove(taken)
        )
        opened = Step(name="network", do=lambda: self._kit.assembly.slots.open(taken.id, taken.policy))
        try:
            await run_steps("take", [Together(steps=[recorded, opened])], checkpoint=self._kit.checkpoint)
        except UndoFailed:
            await self._ledger.keep(taken.becomes(Stage.DELETING, exit_reason="its create failed"))
            raise
        finally:
            self._taking.pop(taken.id, None)
        self._taken += 1
        self._forget(taken.id)
        return taken

    def find_ready(self, sandbox_id: str, *, generation: int) -> Record | None:
        """The one that is ready, or being taken just now: it runs, and all that is its own will stay as it is."""
        record = self._taking.get(sandbox_id) or self._ledger.find(sandbox_id)
        if record is None or record.stage is not Stage.READY or record.generation != generation:
            return None
        return record

    async def make_room(self) -> None:
        """There are no more sandboxes than may be, those that are ready included: creates come first."""
        ready = sorted(self.ready(), key=lambda record: record.changed_at)
        over = self._kit.held_room() + len(ready) - self._kit.max_sandboxes
        await asyncio.gather(*(self.discard(record) for record in ready[: max(0, over)]))

    async def shrink(self) -> int:
        """Give all up, for the host is short of memory; says how many there were."""
        ready = self.ready()
        await asyncio.gather(*(self.discard(record) for record in ready))
        return len(ready)

    # filling and discarding

    async def fill(self, shape: Shape) -> None:
        record = await self._filling.fill(shape)
        self._filled += 1
        self._tell()
        with contextlib.suppress(CpuosError):
            measured = await self._kit.runtime_of(record).stats(record.id)
            self._bytes[record.id] = measured.memory_bytes
        log.info("sandbox ready", sandbox=record.id, template=shape.template, bytes=self._bytes.get(record.id, 0))

    async def discard(self, record: Record) -> None:
        """It goes, as if it had never been. One that was taken meanwhile stays."""
        if record.id not in self._leaving:
            task = self._leaving[record.id] = self._ledger.spawn(self._discard(record.id))
            task.add_done_callback(lambda _: self._leaving.pop(record.id, None))
        await asyncio.shield(self._leaving[record.id])

    async def _discard(self, sandbox_id: str) -> None:
        async with self._ledger.lock(sandbox_id):
            current = self._ledger.find(sandbox_id)
            if current is not None and current.stage is Stage.READY:
                await self._lives.give_up(current)

    async def _remove(self, taken: Record) -> None:
        self._lives.unwatch(taken.id)
        await run_steps("end", self._kit.end_steps(taken), checkpoint=self._kit.checkpoint)
        await self._ledger.forget(taken.id)
        self._forget(taken.id)

    def _given_up(self, sandbox_id: str) -> None:
        self._forget(sandbox_id)
        self._tell()
        self._keeper.ask()

    def _forget(self, sandbox_id: str) -> None:
        self._bytes.pop(sandbox_id, None)

    def _tell_later(self) -> None:
        self._seq += 1
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TAKEN_S, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._seq += 1
        self._changed.set()
        self._changed = asyncio.Event()

    # planning

    async def _plan(self) -> Plan:
        ready = self.ready()
        pressure = await asyncio.to_thread(self._pressure, self._limits.volume)
        room = room_under(
            pressure,
            ready=len(ready),
            unit_bytes=max(self._bytes.values(), default=_UNIT_BYTES),
            held_bytes=self._held_bytes(ready),
            budget_bytes=self._limits.memory_mib << 20,
            free=self._kit.max_sandboxes - self._kit.held_room(),
        )
        if pressure.is_high and ready:
            log.warning("pool shrinks", why=pressure.why, ready=len(ready))
        oldest = self._ledger.clock() - self._limits.max_age
        return make_plan(ready, self._wanted(), room=room, is_old=lambda record: record.changed_at < oldest)

    def _is_there(self, shape: Shape, installed: Mapping[str, str]) -> bool:
        """What it begins with. A snapshot that was made for the copies of a fork alone goes with them."""
        if shape.snapshot is None:
            return installed.get(shape.template) == shape.template_digest
        lasts = time.monotonic() - self._seen.setdefault(shape.snapshot, time.monotonic()) >= SNAPSHOT_LASTS_S
        return lasts and self._kit.assembly.images.has(shape.snapshot)

    def _held_bytes(self, ready: list[Record]) -> int:
        return sum(self._bytes.get(record.id, _UNIT_BYTES) for record in ready)

    def _wanted(self) -> dict[Shape, int]:
        """What is asked for, and what is always kept; nothing of a template that is not here any more."""
        if not self.is_on:
            return {}
        installed = {template.name: template.digest for template in self._kit.templates.installed()}
        wanted = {shape: count for shape, count in self._wishes.wanted().items() if self._is_there(shape, installed)}
        for kind, count in self._limits.keep:
            if count and kind.template in installed:
                shape = _shape_of_kind(kind, digest=installed[kind.template], runtime=self._limits.runtime)
                wanted[shape] = max(count, wanted.get(shape, 0))
        return wanted


def _shape_of_kind(kind: SandboxCreate, *, digest: str, runtime: str) -> Shape:
    return Shape(
        template=kind.template,
        template_digest=digest,
        runtime=runtime,
        cpu=kind.cpu,
        memory_mib=kind.memory_mib,
        disk_mib=kind.disk_mib,
        max_processes=kind.max_processes,
    )


def _told(record: Record) -> ReadySandbox:
    shape = shape_of_record(record)
    return ReadySandbox(
        id=record.id,
        template=shape.template,
        template_digest=shape.template_digest,
        runtime=shape.runtime,
        cpu=shape.cpu,
        memory_mib=shape.memory_mib,
        disk_mib=shape.disk_mib,
        max_processes=shape.max_processes,
        snapshot=shape.snapshot,
    )
