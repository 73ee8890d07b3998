"""How sandboxes come to be: anew, or from what a snapshot holds."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from functools import partial

import structlog

from cpuos.errors import Conflict, InvalidRequest
from cpuos.node.images import MEMORY, ROOT, Manifest, root_name
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.node.ledger import facts_of
from cpuos.node.lives import Lives
from cpuos.node.pool import Pool
from cpuos.node.refusals import could_not, incompatible, not_ready, sandbox_not_found, stale_generation
from cpuos.node.saving import check_room_to_restore
from cpuos.node.steps import Step, Together, UndoFailed, run_steps
from cpuos.runtimes.base import Capability, Probe, Process, Runtime
from cpuos.types.node import NodeSandboxCreate, Restored, SandboxFacts
from cpuos.types.sandbox import StartedFrom

__all__ = ["Creating"]

log = structlog.get_logger("cpuos.node")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """One create: what it is made of."""

    record: Record
    runtime: Runtime
    saved: Manifest | None
    """The snapshot that it begins with."""

    @property
    def restored(self) -> Restored:
        """What it begins with, for what was saved of another build of the template only its /workspace fits."""
        if self.saved is None:
            return Restored.NOTHING
        if self.saved.memory and self.record.request.warm:
            return Restored.MEMORY
        same = self.saved.template_digest == self.record.template_digest
        can = Capability.FILESYSTEM_CHECKPOINT in self.runtime.capabilities
        return Restored.ROOT if self.saved.root and same and can else Restored.WORKSPACE


class Creating:
    """Creates that go on, and those that ended."""

    def __init__(self, kit: Kit, *, lives: Lives, pool: Pool) -> None:
        self._kit = kit
        self._ledger = kit.ledger
        self._lives = lives
        self._pool = pool
        self._going_on: dict[str, asyncio.Task[SandboxFacts]] = {}

    async def create(self, request: NodeSandboxCreate) -> SandboxFacts:
        """Returns when the sandbox's process runs. A repeat joins the first call or answers the same facts."""
        await self._pool.gone(request.id)
        if self._answers_already(request):
            return await self.get(request.id)
        runtime, probe = await self._kit.runtimes.get(request.runtime)
        with self._reading(request.snapshot):
            saved = await self._read_snapshot(request, runtime=runtime)
            await self._kit.templates.fetch(request.template, used=self._used_templates)
            digest = self._choose_template(request, saved)
            if self._answers_already(request):  # another call may have come meanwhile
                return await self.get(request.id)
            self._check_packs(request, runtime=runtime)
            self._check_room(request)
            ready = await self._pool.claim(request, digest=digest)
            if ready is not None:
                task = self._ledger.spawn(self._take(ready, request, runtime=runtime))
            elif request.ready:
                raise not_ready(request.id)
            else:
                self._check_room(request)  # another create may have begun as an unfit ready one went
                record = self._new_record(request, digest, probe=probe)
                self._ledger.begin(record)
                task = self._ledger.spawn(self._create(_Plan(record=record, runtime=runtime, saved=saved)))
            self._going_on[request.id] = task
        return await self._join(request.id, task)

    async def get(self, sandbox_id: str) -> SandboxFacts:
        """Facts of one sandbox; of one that is being created, once that has ended."""
        creating = self._going_on.get(sandbox_id)
        if creating is not None:
            return await self._join(sandbox_id, creating)
        record = self._ledger.find(sandbox_id)
        if record is None or record.stage in (Stage.GONE, Stage.CREATING, Stage.READY):
            raise sandbox_not_found(sandbox_id)
        return facts_of(record)

    async def ended(self, sandbox_id: str) -> None:
        """Return when no create of it goes on."""
        creating = self._going_on.get(sandbox_id)
        if creating is not None:
            await self._join(sandbox_id, creating)

    async def wait(self, sandbox_id: str, *, generation: int, limit_s: float) -> None:
        """Return when no create of this generation goes on, or when the time is up."""
        record, creating = self._ledger.find(sandbox_id), self._going_on.get(sandbox_id)
        if creating is not None and record is not None and record.generation == generation:
            await asyncio.wait([creating], timeout=limit_s)

    async def cancel(self, sandbox_id: str) -> None:
        """A create that goes on ends, and is undone."""
        creating = self._going_on.get(sandbox_id)
        if creating is not None:
            creating.cancel()
            await asyncio.wait([creating])

    # before it begins

    def _answers_already(self, request: NodeSandboxCreate) -> bool:
        """Whether the sandbox is known with exactly these values; refuses what its generation forbids."""
        record = self._ledger.find(request.id)
        if record is None or (request.generation > record.generation and record.stage is Stage.GONE):
            return False
        if record.stage is Stage.READY and request.generation == record.generation:
            return False
        if request.generation < record.generation:
            raise stale_generation(request.id, asked=request.generation, known=record.generation)
        # A repeat may carry a policy that is newer by now: that has a verb of its own.
        known = record.request.model_copy(update={"network": request.network})
        if request == known and record.stage not in (Stage.DELETING, Stage.GONE):
            return True
        code = "wrong_state"
        if request.generation > record.generation:
            why = f"its generation {record.generation} is still {record.stage}; delete that first"
        elif request.ready:
            raise not_ready(request.id)
        elif record.stage in (Stage.DELETING, Stage.GONE):
            why, code = f"its generation {record.generation} was deleted", "stale_generation"
        else:
            why = f"its generation {record.generation} is {record.stage} with other values"
        raise Conflict(f"cannot create sandbox: {request.id}", why, code=code)

    def _check_room(self, request: NodeSandboxCreate) -> None:
        self._kit.admission.require(f"cannot create sandbox: {request.id}", request)

    def _check_packs(self, request: NodeSandboxCreate, *, runtime: Runtime) -> None:
        if request.packs and Capability.PACKS not in runtime.capabilities:
            what = f"cannot create sandbox {request.id} with data packs"
            raise InvalidRequest(what, f"runtime {runtime.name!r} takes none", details={"field": "packs"})
        self._kit.packs.require(request.packs.values())

    def _reading(self, snapshot: str | None) -> contextlib.AbstractContextManager[None]:
        return self._kit.assembly.images.reading(snapshot) if snapshot is not None else contextlib.nullcontext()

    def _choose_template(self, request: NodeSandboxCreate, saved: Manifest | None) -> str:
        """The digest of the image to begin with: the snapshot's own build where that is here, else the installed."""
        if saved is not None and self._kit.templates.has(saved.template, digest=saved.template_digest):
            return saved.template_digest
        return self._kit.templates.keep(request.template).digest

    def _used_templates(self) -> set[str]:
        return {record.template_digest for record in self._ledger.all()}

    async def _read_snapshot(self, request: NodeSandboxCreate, *, runtime: Runtime) -> Manifest | None:
        """The snapshot's manifest, once it is proved to be good and to fit."""
        if request.snapshot is None:
            return None
        saved = await asyncio.to_thread(self._kit.assembly.images.read, request.snapshot)
        what = f"cannot create sandbox {request.id} from snapshot {request.snapshot}"
        wanted = {"template": request.template, "disk_mib": request.disk_mib}
        if saved.memory and request.warm:
            fixed = ("runtime", "cpu", "memory_mib", "max_processes", "packs")
            wanted |= {name: getattr(request, name) for name in fixed}
        for name, value in wanted.items():
            if getattr(saved, name) != value:
                why = f"its {name} is {getattr(saved, name)!r}, not {value!r}"
                raise InvalidRequest(what, why, details={"field": name})
        if saved.memory and request.warm:
            has_template = self._kit.templates.has(saved.template, digest=saved.template_digest)
            incompatible(what, saved, has_template=has_template, runtime=runtime)
            if Capability.PAUSE not in runtime.capabilities:
                raise InvalidRequest(what, f"runtime {runtime.name!r} takes no memory of others")
        return saved

    def _new_record(self, request: NodeSandboxCreate, digest: str, *, probe: Probe) -> Record:
        return Record(
            request=request,
            stage=Stage.CREATING,
            boot_id=self._kit.boot_id,
            changed_at=self._ledger.clock(),
            session_key=secrets.token_hex(32),
            template_digest=digest,
            isolation=probe.isolation,
            isolation_detail=probe.detail,
        )

    async def _join(self, sandbox_id: str, task: asyncio.Task[SandboxFacts]) -> SandboxFacts:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # the caller went away; the create goes on
            raise Conflict(f"cannot create sandbox: {sandbox_id}", "it was deleted meanwhile") from None

    # the create itself

    async def _take(self, ready: Record, request: NodeSandboxCreate, *, runtime: Runtime) -> SandboxFacts:
        try:
            with self._pool.working():
                async with self._ledger.lock(ready.id):
                    taken = await self._pool.take(ready, request)
                    log.info("sandbox taken", sandbox=taken.id)
                    return self._ledger.publish(taken)
        except Exception as error:
            raise could_not("create", ready.id, error) from error
        finally:
            self._going_on.pop(ready.id, None)

    async def _create(self, plan: _Plan) -> SandboxFacts:
        record = plan.record
        try:
            with self._pool.working(), self._reading(record.request.snapshot):
                await self._pool.make_room()
                async with self._ledger.lock(record.id):
                    await self._in_steps(record, self._steps(plan))
                    log.info("sandbox created", sandbox=record.id, generation=record.generation)
                    current = self._ledger.find(record.id)
                    assert current is not None
                    return self._lives.begin(current, plan.runtime)
        finally:
            self._going_on.pop(record.id, None)

    def _steps(self, plan: _Plan) -> list[Step | Together]:
        record, assembly = plan.record, self._kit.assembly

        async def started(process: Process) -> None:
            nonlocal record
            now = self._ledger.clock()
            record = record.becomes(Stage.RUNNING, process=process, started_at=now, changed_at=now, **_taken_up(plan))

        # Neither is waited for on its way to the volume. A restarted daemon reads it from the page cache; with the host
        # the process dies, and what lies on the volume without a record is an orphan.
        recorded = Step(
            name="record",
            do=lambda: self._ledger.keep(record, sync=False),
            undo=lambda: self._ledger.forget(record.id),
        )
        spec = self._kit.spec_of(record)
        image = assembly.images.path(plan.saved.name) if plan.saved is not None else None
        warm = plan.restored is Restored.MEMORY
        parts = assembly.part_steps(spec, network=record.policy, image=image, warm=warm)
        memory = image / MEMORY if image is not None and warm else None
        root = image / ROOT if image is not None and plan.restored is Restored.ROOT else None
        start = assembly.start_step(spec, plan.runtime, started=started, memory=memory, root=root)
        if plan.saved is not None:
            room = partial(check_room_to_restore, self._kit, plan.saved, verb="create", sandbox_id=record.id)
            parts.append(Step(name="room", do=room))
        if plan.saved is not None and root is not None:
            parts.append(self._keep_step(record, plan.saved))
        return [
            Together(steps=[recorded, *parts]),
            Together(steps=[start, *self._check_steps(plan)]),
            # Who begins with kept files may remove them then.
            Step(name="running", do=lambda: self._ledger.keep(record, sync=plan.saved is not None and not warm)),
        ]

    def _keep_step(self, record: Record, saved: Manifest) -> Step:
        """Should it die before its root is saved, it was last saved here. The files get a second name."""
        images, name = self._kit.assembly.images, root_name(record.id)
        kept = {"name": name, "sandbox": record.id, "generation": record.generation, "freeze": "", "root_at": None}
        manifest = saved.model_copy(update={**kept, "created_at": saved.root_at or saved.created_at})

        def keep() -> None:
            images.link(saved.name, name, [ROOT])
            images.commit(manifest)

        undo = partial(asyncio.to_thread, images.discard, name)
        return Step(name="keep", do=lambda: asyncio.to_thread(keep), undo=undo)

    def _check_steps(self, plan: _Plan) -> list[Step]:
        """Nobody reaches the guest until all has been found as it was saved: both can be done at once."""
        folders = {Restored.MEMORY: [MEMORY], Restored.ROOT: [ROOT]}.get(plan.restored)
        if plan.saved is None or folders is None:
            return []
        name, images = plan.saved.name, self._kit.assembly.images
        return [Step(name="check", do=lambda: asyncio.to_thread(images.check, name, folders=folders))]

    async def _in_steps(self, record: Record, steps: list[Step | Together]) -> None:
        try:
            await run_steps("create", steps, checkpoint=self._kit.checkpoint)
        except UndoFailed as error:
            # What is left on the host has an owner until the sweeper has removed it.
            await self._ledger.keep(record.becomes(Stage.DELETING, exit_reason="its create failed"))
            raise could_not("create", record.id, error.__cause__ or error) from error
        except Exception as error:
            raise could_not("create", record.id, error) from error


def _taken_up(plan: _Plan) -> dict[str, object]:
    """What the record says of where it came from."""
    if plan.saved is None:
        return {}
    saved_at = (plan.restored is Restored.ROOT and plan.saved.root_at) or plan.saved.created_at
    said: dict[str, object] = {"restored": plan.restored, "restored_at": saved_at}
    if plan.restored is Restored.MEMORY:
        said |= {"incarnation": 1, "thaw": plan.saved.freeze, "thaw_from": plan.saved.sandbox}
        said["started_from"] = StartedFrom.RESTORE
    return said
