"""The work of one build in its sandbox: steps, image, trial. What it makes goes again unless it is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import structlog
from sqlalchemy import Row

from cpuos.errors import CpuosError
from cpuos.scheduler.base import Scheduler
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.sandboxes import row_of
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.tasks import Tasks
from cpuos.server.templates.active import Active
from cpuos.server.templates.failures import build_failed, step_failed, too_large
from cpuos.server.templates.guest import Gate, Guest
from cpuos.server.templates.importing import (
    CONFIG,
    FETCHED,
    FITTED,
    MAX_CONFIG,
    ROOT,
    Imported,
    fetch_step,
    fit_step,
    read_fitted,
    read_imported,
    unpack_step,
)
from cpuos.server.templates.layers import Layers
from cpuos.server.templates.names import Meaning
from cpuos.server.templates.packer import Packer, read_packer
from cpuos.server.templates.recipe import (
    IMAGE,
    REST,
    UNREST,
    WORK,
    Packed,
    Step,
    pack_step,
    read_packed,
    steps_of,
)
from cpuos.server.templates.room import TemplateRoom
from cpuos.server.templates.starts import READY_S, begin
from cpuos.types.command import Command
from cpuos.types.sandbox import LIVE_STATES, Isolation, SandboxCreate, SandboxState
from cpuos.types.template import StepState, TemplateInfo

__all__ = ["BUILD_LABEL", "Runner", "quietly"]

BUILD_LABEL = "cpuos.build"
PACKER = "mkfs.erofs"
Known = Callable[[Active], Coroutine[Any, Any, TemplateInfo | None]]
_PACKED_OUTPUT = 256 << 10
_TRY_S = 60.0
_TRY_DISK_MIB = 1024
_LOOK_S = 5.0
_log = structlog.get_logger("cpuos.server.templates")


class Runner:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        layers: Layers,
        room: TemplateRoom,
        tasks: Tasks,
        clock: Clock,
        gate: Gate,
        max_mib: int,
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._layers = layers
        self._room = room
        self._tasks = tasks
        self._clock = clock
        self._gate = gate
        self._max_mib = max_mib
        self._programs: dict[str, Packer] = {}

    async def work(self, active: Active, image: str, *, known: Known, undo: AsyncExitStack) -> TemplateInfo:
        """All of a build that can be cut short, by a cancel or by its time. `undo` removes the image from the node;
        `known` finds, by its key, what was made before."""
        guest = self._gate.guest(active.row, actor=active.actor)
        if active.cached:
            await guest.wait(await guest.start(UNREST, name=f"{WORK}/unrest"))
        else:
            await guest.put(f"{WORK}/started", b"", mode=0o600)
        while not await self._is_uploaded(active):
            await self.require_sandbox(active)
        imported = None
        if active.request.image is not None:
            imported = await self._import(active, guest, known=known)
            if active.known is not None:
                return active.known
        await self._steps(active, guest)
        packed = await self._pack(active, guest, root="" if imported is None else ROOT)
        template = self._manifest(active, packed, imported)
        await self.unbroken(self._room.check_size(active.workspace, active.build.name, size=packed.size))
        node = self._scheduler.client(active.row.node)
        undo.push_async_callback(quietly, lambda: node.delete_template(image))
        await self._during(active, "store", self._store(guest, node, image=image, packed=packed))
        # Its room is free for the try: the workspace may have no more than this one sandbox.
        await self.kill(active.row, reason="its template is built")
        await self._during(active, "try", self._try(active, template, image=image))
        return template

    async def _steps(self, active: Active, guest: Guest) -> None:
        for number, (step, key) in enumerate(zip(steps_of(active.request), active.layers, strict=True)):
            if number < active.cached:
                active.step(step.name, state=StepState.DONE, cached=True)
                continue
            await self._step(active, guest, step)
            await guest.wait(await guest.start(REST, name=f"{WORK}/rest"))
            await self.to_its_end(self._layers.keep(active, key))

    async def require_sandbox(self, active: Active) -> None:
        """Raise when it has ended, whoever ended it."""
        async with self._database.read() as connection:
            row = await row_of(connection, active.row.id)
        if row is None or SandboxState(row.state) not in LIVE_STATES:
            why = "its record is gone" if row is None else row.reason or row.state
            raise build_failed(active.build, active.at, f"its sandbox has ended: {why}")

    async def _is_uploaded(self, active: Active) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await active.uploaded.wait()
        return active.uploaded.is_set()

    async def _import(self, active: Active, guest: Guest, *, known: Known) -> Imported:
        """Lay out the root of an image of others, apart from the sandbox's own."""
        source = active.request.image
        assert source is not None
        loader = await self._carry(guest, "skopeo", "umoci")
        await self._step(active, guest, fetch_step(source, loader=loader))
        config = await guest.read(CONFIG, limit=MAX_CONFIG)
        imported = read_imported(source, fetched=await guest.read(FETCHED, limit=100), config=config)
        if imported is None:
            raise build_failed(active.build, "fetch", "what the image says of itself makes no sense")
        if source.digest is None:
            pinned = source.model_copy(update={"reference": f"{source.repository}@{imported.info.digest}"})
            active.request = active.request.model_copy(update={"image": pinned})
            if not active.request.fresh:
                active.known = await self.unbroken(known(active))
                if active.known is not None:
                    return imported
        await self._step(active, guest, unpack_step(loader=loader, max_mib=self._max_mib))
        await self._step(active, guest, fit_step({**imported.env, **active.request.env}))
        return read_fitted(imported, await guest.read(FITTED, limit=1000))

    async def _carry(self, guest: Guest, *names: str) -> str:
        """Bring programs of this host into the work folder; the name of the loader that starts them."""
        files: dict[str, bytes] = {}
        for name in names:
            if name not in self._programs:
                self._programs[name] = await read_packer(name)
            files |= self._programs[name].files
        for name, content in files.items():
            await guest.put(f"{WORK}/{name}", content)
        return self._programs[names[0]].loader

    async def _step(self, active: Active, guest: Guest, step: Step) -> Command:
        command_id = await guest.start(
            step.script, name=f"{WORK}/step-{step.name.replace(' ', '-')}", env=active.request.env
        )
        active.step(step.name, state=StepState.RUNNING, command=command_id)
        command = await guest.wait(command_id)
        if command.exit_code != 0:
            raise await step_failed(guest, command, build=active.build, step=step.name)
        active.step(step.name, state=StepState.DONE)
        return command

    async def _pack(self, active: Active, guest: Guest, *, root: str) -> Packed:
        loader = await self._carry(guest, PACKER)
        step = pack_step(loader, PACKER, max_mib=self._max_mib, root=root)
        command = await self._step(active, guest, step)
        output = await guest.output_end(command.id, stream="stdout", limit=_PACKED_OUTPUT)
        packed = read_packed(output)
        if packed is None:
            raise build_failed(active.build, "pack", "the build sandbox did not say what it made")
        if packed.size > self._max_mib << 20:
            raise too_large(active.build, f"it has {packed.size >> 20} MiB, and {self._max_mib} MiB are allowed")
        return packed

    def _manifest(self, active: Active, packed: Packed, imported: Imported | None) -> TemplateInfo:
        request = active.request
        start, env = request.start, request.env
        if imported is not None:
            start, env = start or imported.start, {**imported.env, **env}
        return TemplateInfo(
            name=active.build.name,
            digest=f"sha256:{packed.sha256}",
            size_bytes=packed.size,
            parent=request.from_,
            parent_digest=active.parent_digest,
            steps=[f"{step.name}: {step.text}" for step in steps_of(request)],
            files={file.path: file.sha256 for file in request.files},
            image=None if imported is None else imported.info,
            env=env,
            start=start,
            ready=request.ready,
            dropped=packed.dropped,
            dropped_count=packed.dropped_count,
            key=active.key,
            created_at=self._clock(),
            created_by=active.actor,
        )

    async def _store(self, guest: Guest, node: Any, *, image: str, packed: Packed) -> None:
        async with guest.open(IMAGE) as content:
            await node.put_template(image, size=packed.size, sha256=packed.sha256, content=content)
        await self._scheduler.refresh()

    async def _try(self, active: Active, template: TemplateInfo, *, image: str) -> None:
        """A sandbox from the image runs a program, and `start` becomes ready: else nobody could use it."""
        request = active.request
        wanted = SandboxCreate(
            template=active.request.from_,
            cpu=request.cpu,
            memory_mib=request.memory_mib,
            disk_mib=min(request.disk_mib, _TRY_DISK_MIB),
            timeout_s=_TRY_S + READY_S,
            labels={BUILD_LABEL: active.build.id},
            min_isolation=Isolation.EMULATED,
        )
        meaning = Meaning(name=template.name, image=image, template=template)
        created = self._tasks.start(
            self._lifecycle.create(wanted, workspace=active.workspace, actor=active.actor, meaning=meaning)
        )
        try:
            row = await asyncio.shield(created)
            async with asyncio.timeout(_TRY_S + READY_S):
                await self._try_in(active, row, template)
        except TimeoutError:
            raise build_failed(active.build, "try", f"a sandbox of it was not ready within {_TRY_S:g} s") from None
        finally:
            await asyncio.wait([created])
            if created.exception() is None:
                await self.kill(created.result(), reason="the template was tried")

    async def _try_in(self, active: Active, row: Row[Any], template: TemplateInfo) -> None:
        guest = self._gate.guest(row, actor=active.actor)
        shell = "bash" if template.image is None else template.image.shell
        command = await guest.wait(await guest.start("true", name="/tmp/try", shell=shell))
        if command.exit_code != 0:
            raise await step_failed(guest, command, build=active.build, step="try")
        await begin(guest, template)

    async def _during(self, active: Active, name: str, work: Awaitable[Any]) -> None:
        active.step(name, state=StepState.RUNNING)
        await work
        active.step(name, state=StepState.DONE)

    async def unbroken(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Work on the database, which a cancel of the build does not cut short."""
        return await asyncio.shield(self._tasks.start(work))

    async def to_its_end(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Work on the sandbox: a cancel of the build waits for its end."""
        task = self._tasks.start(work)
        try:
            return await asyncio.shield(task)
        finally:
            await asyncio.wait([task])

    async def kill(self, row: Row[Any], *, reason: str) -> None:
        try:
            await self.unbroken(self._lifecycle.kill(row, reason=reason))
        except CpuosError as error:
            _log.warning("build sandbox not ended yet", sandbox=row.id, why=str(error))  # its timeout ends it


async def quietly(work: Callable[[], Awaitable[Any]]) -> None:
    """What cannot be tidied now is tidied later."""
    try:
        await work()
    except CpuosError as error:
        _log.warning("template not tidied yet", why=str(error))
