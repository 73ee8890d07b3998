"""The verbs of a node. Each changes the host in steps that can be undone; the journal is on disk before a process
starts or ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from cpuos.node.admission import Admission, AdmissionRules
from cpuos.node.assembly import Assembly
from cpuos.node.changes import ChangeFeed
from cpuos.node.creating import Creating
from cpuos.node.draining import Door, Draining
from cpuos.node.host import short_of_memory
from cpuos.node.identity import NodeIdentity, SignedStatement
from cpuos.node.journal import Journal, Record, Stage
from cpuos.node.kept_templates import KeptTemplates
from cpuos.node.kit import Kit
from cpuos.node.ledger import Ledger, facts_of
from cpuos.node.limits import read_limits
from cpuos.node.lives import Lives
from cpuos.node.packs import PackStore
from cpuos.node.pausing import Pausing
from cpuos.node.pool import Pool, PoolLimits
from cpuos.node.pressure import PressureWatch
from cpuos.node.refusals import could_not, stale_generation, stale_policy
from cpuos.node.roots import Roots
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.snapshots import Snapshots
from cpuos.node.steps import Checkpoint, Step, run_steps
from cpuos.node.stored import Stored
from cpuos.node.upkeep import Upkeep
from cpuos.node.usage import read_usage
from cpuos.node.volume import Tell, Volume, VolumeWatch
from cpuos.runtimes.base import GuestLink
from cpuos.settings import Settings
from cpuos.types.limits import LimitFacts
from cpuos.types.network import EffectivePolicy
from cpuos.types.node import (
    Drained,
    NodeResume,
    NodeSandboxCreate,
    NodeSnapshotCreate,
    SandboxFacts,
    SandboxStats,
    SandboxUsage,
    SnapshotFacts,
)

__all__ = ["NodeService", "Opened"]

# Well below the time that a dialling gateway gives the node for its answer.
DIAL_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One dial: a socket to the agent, and what proves to it that the node asks."""

    link: GuestLink
    signed: SignedStatement
    session_key: bytes


class NodeService:
    """What the node knows and does, for its API and its dial socket."""

    def __init__(
        self,
        *,
        assembly: Assembly,
        journal: Journal,
        identity: NodeIdentity,
        templates: KeptTemplates,
        runtimes: RuntimeTable,
        boot_id: str,
        rules: AdmissionRules,
        short_memory: Callable[[], str] = short_of_memory,
        volume: Volume,
        packs: PackStore,
        halted: Tell = lambda sandbox_id, halted: None,
        pool: PoolLimits | None = None,
        root_interval_s: float = 0,
        door: Door | None = None,
        checkpoint: Checkpoint = lambda point: None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._assembly = assembly
        self._identity = identity
        self._runtimes = runtimes
        self._checkpoint = checkpoint
        self.ledger = Ledger(journal, clock=clock)
        self._kit = Kit(
            ledger=self.ledger,
            assembly=assembly,
            runtimes=runtimes,
            templates=templates,
            checkpoint=checkpoint,
            boot_id=boot_id,
            admission=Admission(self.ledger.all, runtimes=runtimes, volume=volume, rules=rules),
            volume=volume,
            packs=packs,
        )
        self._volume_watch = VolumeWatch(volume, ledger=self.ledger, runtimes=runtimes, tell=halted)
        self._lives = Lives(self._kit)
        self.pool = Pool(self._kit, lives=self._lives, limits=pool or PoolLimits())
        self.pressure = PressureWatch(self._kit.admission, shrink=self.pool.shrink, read=short_memory)
        self._creating = Creating(self._kit, lives=self._lives, pool=self.pool)
        self._pausing = Pausing(self._kit, lives=self._lives)
        self._draining = Draining(self.ledger, door=door, pause=self._pausing.pause)
        self._snapshots = Snapshots(self._kit)
        self._upkeep = Upkeep(self._kit, lives=self._lives)
        self.roots = Roots(self._kit, keep=self._snapshots.keep_root_of, interval_s=root_interval_s)

    @property
    def admission(self) -> Admission:
        return self._kit.admission

    @property
    def changes(self) -> ChangeFeed:
        return self.ledger.changes

    # verbs

    async def create(self, request: NodeSandboxCreate) -> SandboxFacts:
        """Returns when the sandbox's process runs. A repeat joins the first call or answers the same facts."""
        self._draining.check("create", request.id)
        return await self._creating.create(request)

    async def get(self, sandbox_id: str) -> SandboxFacts:
        """Facts of one sandbox; of one that is being created, once that has ended."""
        return await self._creating.get(sandbox_id)

    def list(self) -> list[SandboxFacts]:
        """All sandboxes but those that are being created."""
        hidden = (Stage.CREATING, Stage.GONE, Stage.READY)
        return [facts_of(record) for record in self.ledger.all() if record.stage not in hidden]

    async def delete(self, sandbox_id: str, *, generation: int) -> None:
        """Idempotent. Ends a create that is going on, and leaves a mark that refuses late repeats of it."""
        record = self.ledger.find(sandbox_id)
        if record is None or record.stage is Stage.GONE:
            return
        if generation < record.generation:
            raise stale_generation(sandbox_id, asked=generation, known=record.generation)
        await self.ledger.whole(self._delete(record))

    async def update_network(self, sandbox_id: str, *, generation: int, policy: EffectivePolicy) -> None:
        """Put a policy in force, unless a newer one is already; what it forbids is cut. May be repeated."""
        await self._creating.ended(sandbox_id)
        await self.ledger.whole(self._update_network(sandbox_id, generation=generation, policy=policy))

    async def pause(
        self, sandbox_id: str, *, generation: int, freeze: str, labels: dict[str, str] | None = None
    ) -> SandboxFacts:
        work = self._pausing.pause(sandbox_id, generation=generation, freeze=freeze, labels=labels)
        return await self.ledger.whole(work)

    async def drain(self, *, limit_s: float) -> Drained:
        """The node is shut down: pause all that run. Nothing new runs here from then on."""
        return await self.ledger.whole(self._draining.drain(limit_s=limit_s))

    async def resume(self, sandbox_id: str, request: NodeResume) -> SandboxFacts:
        self._draining.check("resume", sandbox_id)
        return await self.ledger.whole(self._pausing.resume(sandbox_id, request))

    async def settle(self, sandbox_id: str, *, generation: int) -> None:
        await self.ledger.whole(self._pausing.settle(sandbox_id, generation=generation))

    async def repause(self, sandbox_id: str, *, generation: int, frozen: bool = False) -> SandboxFacts:
        return await self.ledger.whole(self._pausing.repause(sandbox_id, generation=generation, frozen=frozen))

    async def snapshot(self, sandbox_id: str, request: NodeSnapshotCreate) -> SnapshotFacts:
        return await self.ledger.whole(self._snapshots.make(sandbox_id, request))

    async def keep_root(self, sandbox_id: str, *, generation: int) -> None:
        await self.ledger.whole(self._snapshots.keep_root(sandbox_id, generation=generation))

    async def snapshots(self) -> list[SnapshotFacts]:
        return await self._snapshots.list()

    async def delete_snapshot(self, snapshot: str) -> None:
        await self.ledger.whole(self._snapshots.delete(snapshot))

    async def delete_pack(self, image: str) -> None:
        """Refused while a sandbox or an image of one has it."""
        saved = await asyncio.to_thread(self._assembly.images.packs)
        used = {pack for record in self.ledger.all() if record.stage is not Stage.GONE for pack in record.packs}
        await self._kit.packs.delete(image, used=used | saved)

    async def stats(self, sandbox_id: str) -> SandboxStats:
        record = self.ledger.running(sandbox_id)
        measured = await self._kit.runtime_of(record).stats(sandbox_id)
        return SandboxStats(
            id=sandbox_id,
            memory_bytes=measured.memory_bytes,
            cpu_seconds=measured.cpu_seconds,
            processes=measured.processes,
            disk_used_bytes=await self._assembly.disks.used_bytes(sandbox_id),
        )

    async def usage(self) -> list[SandboxUsage]:
        """What all that run have used so far."""
        return await read_usage(self._kit)

    async def limits(self, sandbox_id: str, *, generation: int) -> LimitFacts:
        """Which limits of a running sandbox are used up now."""
        return await read_limits(self._kit, self.ledger.running(sandbox_id, generation=generation))

    async def dial(self, sandbox_id: str, *, generation: int) -> Opened:
        """A socket to the agent of a running sandbox of exactly this generation; one that is being created is waited
        for, but not for longer than `DIAL_WAIT_S`. One that is ready is reached before the create that takes it: who
        knows its id has the server's word that there is one."""
        record = self.pool.find_ready(sandbox_id, generation=generation)
        if record is None:
            await self._creating.wait(sandbox_id, generation=generation, limit_s=DIAL_WAIT_S)
            record = self.ledger.running(sandbox_id, generation=generation)
        if record.unsettled and not record.told:
            record = await self.ledger.whole(self._note_told(sandbox_id, generation=generation))
        key = bytes.fromhex(record.session_key)
        signed = self._identity.sign_statement(
            sandbox_id,
            generation,
            session_key=key,
            hostname=record.request.hostname,
            incarnation=record.incarnation,
            thaw=record.thaw or None,
            frozen_as=record.thaw_from or None,
        )
        return Opened(link=await self._assembly.slots.guest_link(sandbox_id), signed=signed, session_key=key)

    def stored(self, settings: Settings, *, node: str) -> Stored:
        """What takes room here."""
        return Stored(self._kit, upkeep=self._upkeep, settings=settings, node=node)

    # the daemon's start and end

    async def recover(self) -> None:
        """Make host and journal agree again, however the last daemon ended. Runs before any call is taken."""
        await self._upkeep.recover()

    def start(self) -> None:
        """Probe the runtimes, stock up, and begin to try again, now and then, what could not be done."""
        self._runtimes.start()
        self._assembly.disks.start()
        self._upkeep.start()
        self.roots.start()
        self.pool.start()
        self._volume_watch.start()
        self.pressure.start()

    async def sweep(self) -> None:
        """One round of what is done now and then."""
        await self._upkeep.sweep()

    async def close(self) -> None:
        """Finish what goes on and let go. Sandboxes run on."""
        await self._volume_watch.close()
        await self.roots.close()
        await self.pressure.close()
        await self._upkeep.close()
        await self.pool.close()
        await self._lives.close()
        self._assembly.receipts.close()
        await self.ledger.finish()
        await self._assembly.disks.close()
        await self._assembly.slots.close()
        await self._runtimes.close()

    # the work of the short ones

    async def _delete(self, asked: Record) -> None:
        await self._creating.cancel(asked.id)
        await self.roots.give_up(asked.id)
        async with self.ledger.lock(asked.id):
            record = self.ledger.find(asked.id)
            if record is None:  # its create was undone; the mark refuses a late repeat
                await self.ledger.keep(self.ledger.gone(asked))
            elif record.stage is not Stage.GONE:
                await self._lives.remove(record)

    async def _note_told(self, sandbox_id: str, *, generation: int) -> Record:
        async with self.ledger.lock(sandbox_id):
            record = self.ledger.running(sandbox_id, generation=generation)
            if record.unsettled:
                record = record.becomes(record.stage, told=True)
                await self.ledger.keep(record)
            return record

    async def _update_network(self, sandbox_id: str, *, generation: int, policy: EffectivePolicy) -> None:
        async with self.ledger.lock(sandbox_id):
            record = self.ledger.held(sandbox_id, generation=generation)
            if policy.version < record.policy.version:
                raise stale_policy(sandbox_id, asked=policy.version, known=record.policy.version)
            steps = [Step(name="record", do=lambda: self.ledger.keep(record.becomes(record.stage, network=policy)))]
            if record.stage is not Stage.PAUSED:  # that one has no slot: its resume puts the newest in force
                steps.append(Step(name="apply", do=lambda: self._assembly.slots.update(sandbox_id, policy)))
            try:
                await run_steps("network", steps, checkpoint=self._checkpoint)
            except Exception as error:
                raise could_not("change the network of", sandbox_id, error) from error
