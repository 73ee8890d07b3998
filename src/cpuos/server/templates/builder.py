"""Builds: each in an ordinary sandbox of the workspace, which is all that a build's steps can reach.

The host sees of a build its commands' recorded output and, at the end, the image as bytes: it is copied to the node by
digest and size. Nothing of it is read or unpacked outside of sandboxes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy import Row

from cpuos.errors import (
    AgentFailure,
    Conflict,
    CpuosError,
    FileProblem,
    NotFound,
    PlatformError,
    SandboxGone,
)
from cpuos.scheduler.base import Scheduler
from cpuos.server.asks import new_id
from cpuos.server.clock import Clock
from cpuos.server.db import templates as records
from cpuos.server.db.database import Database
from cpuos.server.db.sandboxes import row_of
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.tasks import Tasks
from cpuos.server.templates.failures import build_failed, step_failed, too_large, took_too_long, was_cancelled
from cpuos.server.templates.guest import Gate, Guest
from cpuos.server.templates.names import Meaning, TemplateNames
from cpuos.server.templates.packer import Packer, read_packer
from cpuos.server.templates.recipe import (
    IMAGE,
    WORK,
    Packed,
    Step,
    build_key,
    pack_step,
    read_packed,
    steps_of,
    steps_shown,
)
from cpuos.server.templates.room import TemplateRoom
from cpuos.server.templates.starts import READY_S, begin
from cpuos.types.command import Command
from cpuos.types.error import Error
from cpuos.types.sandbox import Isolation, SandboxCreate
from cpuos.types.template import Build, BuildState, BuildStep, StepState, TemplateBuild, TemplateInfo

__all__ = ["BUILD_LABEL", "Builder"]

BUILD_LABEL = "cpuos.build"
_PACKED_OUTPUT = 256 << 10
# The build ends its sandbox; the sandbox's own time is for what nobody ends.
_SANDBOX_MARGIN_S = 60.0
_TRY_S = 60.0
_TRY_DISK_MIB = 1024
_TIDY_S = 300.0
_CLOSE_S = 5.0
_log = structlog.get_logger("cpuos.server.templates")


@dataclass(kw_only=True)
class _Active:
    """A build at work in this process."""

    build: Build
    request: TemplateBuild
    workspace: str
    actor: str
    parent_digest: str
    sandbox: Row[Any]
    uploaded: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    cancelled: str = ""
    """By whom."""
    settled: bool = False
    """How it ends is certain: from here on it is not cancelled."""

    def step(self, name: str, **changes: Any) -> None:
        steps = [step.model_copy(update=changes) if step.name == name else step for step in self.build.steps]
        self.build = self.build.model_copy(update={"steps": steps})

    def running_step(self) -> BuildStep | None:
        return next((step for step in self.build.steps if step.state is StepState.RUNNING), None)


class Builder:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        names: TemplateNames,
        tasks: Tasks,
        clock: Clock,
        gate: Gate,
        max_mib: int,
        workspace_mib: int,
    ) -> None:
        """`max_mib` is of one image, `workspace_mib` of all that a workspace has."""
        self._database = database
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._names = names
        self._tasks = tasks
        self._clock = clock
        self._gate = gate
        self._max_mib = max_mib
        self._room = TemplateRoom(database, workspace_mib=workspace_mib)
        self._active: dict[str, _Active] = {}
        self._begun: Counter[str] = Counter()
        self._storing: set[str] = set()
        self._packer: Packer | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """End what an earlier process left, and look now and then for images that nobody needs."""
        self._tidying = asyncio.create_task(self._tidy_for_ever())

    async def close(self) -> None:
        self._stopping.set()
        if self._tidying is not None:
            await asyncio.wait([self._tidying], timeout=_CLOSE_S)
        building = [active for active in self._active.values() if active.task is not None]
        for active in building:
            _cancel(active, by="the server, which stops")
        if building:
            await asyncio.wait([active.task for active in building if active.task], timeout=_CLOSE_S)
        await self._gate.aclose()

    # verbs

    async def create(
        self, request: TemplateBuild, *, workspace: str, actor: str, begun: Callable[[str], None]
    ) -> tuple[Build, Row[Any] | None]:
        """A build and its sandbox; none when the same was built before, and the build is ready then."""
        if any(facts.name == request.name for facts in self._names.installed()):
            raise Conflict(
                f"cannot build template: the name {request.name!r} is taken",
                "a template of the installation has it",
                code="name_taken",
                hint="use another name",
                details={"field": "name", "value": request.name},
            )
        at_work = sum(active.workspace == workspace for active in self._active.values()) + self._begun[workspace]
        await self._room.check_counts(workspace, request.name, builds=at_work)
        parent = await self._names.get(workspace, request.from_)
        reused = await self._reuse(request, workspace=workspace, parent_digest=parent.digest)
        if reused is not None:
            return reused, None
        self._begun[workspace] += 1
        try:
            build_id = new_id()
            wanted = SandboxCreate(
                template=request.from_,
                cpu=request.cpu,
                memory_mib=request.memory_mib,
                disk_mib=request.disk_mib,
                timeout_s=request.timeout_s + _SANDBOX_MARGIN_S,
                labels={BUILD_LABEL: build_id},
                min_isolation=Isolation.EMULATED,  # the steps change the root that they see
            )
            row = await self._lifecycle.create(wanted, workspace=workspace, actor=actor, begun=begun)
        finally:
            self._begun[workspace] -= 1
        build = Build(
            id=build_id,
            name=request.name,
            state=BuildState.UPLOADING if request.files else BuildState.RUNNING,
            sandbox=row.id,
            steps=steps_shown(request),
            created_at=self._clock(),
        )
        active = _Active(
            build=build,
            request=request,
            workspace=workspace,
            actor=actor,
            parent_digest=row.template_digest,
            sandbox=row,
        )
        self._active[build_id] = active
        async with self._database.write() as connection:
            await records.insert_build(connection, build, workspace=workspace, created_at=build.created_at)
        if not request.files:
            active.uploaded.set()
        active.task = self._tasks.start(self._run(active))
        return build, row

    async def get(self, workspace: str, build_id: str) -> Build:
        active = self._active.get(build_id)
        if active is not None and active.workspace == workspace:
            return active.build
        async with self._database.read() as connection:
            build = await records.build_of(connection, workspace, build_id)
        if build is None:
            raise NotFound(
                f"cannot find build {build_id!r}", "this workspace has none of that id", code="build_not_found"
            )
        return build

    async def uploaded(self, workspace: str, build_id: str) -> Build:
        """Its files are uploaded. May be repeated."""
        build = await self.get(workspace, build_id)
        active = self._active.get(build_id)
        if active is not None and build.state is BuildState.UPLOADING:
            active.build = build.model_copy(update={"state": BuildState.RUNNING})
            active.uploaded.set()
            return active.build
        return build

    async def cancel(self, workspace: str, build_id: str, *, by: str) -> Build:
        """End it, and answer when nothing of it is left. One that has ended stays as it is."""
        await self.get(workspace, build_id)
        active = self._active.get(build_id)
        if active is not None and active.task is not None:
            _cancel(active, by=by)
            await asyncio.wait([active.task])
        return await self.get(workspace, build_id)

    async def begin(self, row: Row[Any], *, actor: str) -> None:
        """In a sandbox that was just created: run what its template starts, and wait until it is ready."""
        if row.image is None:
            return
        meaning = await self._names.resolve(row.workspace, row.template)
        if meaning.image != row.image or meaning.template is None:
            return  # the name means another image since a moment ago
        try:
            await begin(self._gate.guest(row, actor=actor), meaning.template)
        except CpuosError:
            await self._kill(row, reason="what its template starts was not ready")
            raise

    async def _tidy_for_ever(self) -> None:
        while not self._stopping.is_set():
            await _quietly(self.tidy)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TIDY_S):
                    await self._stopping.wait()

    async def tidy(self) -> None:
        """End what an earlier process left, and remove images that no name means and no sandbox runs from."""
        async with self._database.read() as connection:
            left = await records.open_builds(connection, except_for=set(self._active))
        for build in left:
            await self._end_left(build)
        kept = {*self._storing}
        images = set(self._names.images())
        async with self._database.read() as connection:
            kept |= await records.named_images(connection)
        for image in sorted(images - kept - self._storing):
            for view in self._scheduler.nodes():
                await self._scheduler.client(view.facts.node).delete_template(image)

    # the run of one build

    async def _run(self, active: _Active) -> None:
        image = f"built-{active.build.id}"
        try:
            async with AsyncExitStack() as undo:
                async with asyncio.timeout(active.request.timeout_s):
                    template = await self._work(active, image, undo=undo)
                active.settled = True
                async with self._database.write() as connection:
                    await records.put_template(connection, workspace=active.workspace, image=image, template=template)
                undo.pop_all()
            await self._end(active, state=BuildState.READY, template=template)
        except TimeoutError:
            error = took_too_long(active.build, _at(active), limit_s=active.request.timeout_s)
            await self._end(active, state=BuildState.FAILED, error=error)
        except asyncio.CancelledError:
            if not active.cancelled:
                raise  # the server ends: the next start says how this ended
            error = was_cancelled(active.build, _at(active), by=active.cancelled)
            await self._end(active, state=BuildState.FAILED, error=error)
        except CpuosError as error:
            if isinstance(error, AgentFailure | FileProblem | SandboxGone):  # the build's own doing
                error = build_failed(active.build, _at(active), f"{error.what}: {error.why}")
            await self._end(active, state=BuildState.FAILED, error=error)
        except Exception:
            _log.exception("build failed", build=active.build.id)
            fault = PlatformError("cannot build template: a fault of cpuOS", "the server's log has the details")
            await self._end(active, state=BuildState.FAILED, error=fault)

    async def _work(self, active: _Active, image: str, *, undo: AsyncExitStack) -> TemplateInfo:
        """All that can be cut short: by a cancel, and by the build's time."""
        request, build = active.request, active.build
        self._packer = self._packer or await read_packer()
        guest = self._gate.guest(active.sandbox, actor=active.actor)
        await guest.put(f"{WORK}/started", b"", mode=0o600)
        await active.uploaded.wait()
        for step in steps_of(request):
            await self._step(active, guest, step)
        packed = await self._pack(active, guest)
        template = TemplateInfo(
            name=build.name,
            digest=f"sha256:{packed.sha256}",
            size_bytes=packed.size,
            parent=request.from_,
            parent_digest=active.parent_digest,
            steps=[f"{step.name}: {step.text}" for step in steps_of(request)],
            files={file.path: file.sha256 for file in request.files},
            env=request.env,
            start=request.start,
            ready=request.ready,
            dropped=packed.dropped,
            dropped_count=packed.dropped_count,
            key=build_key(request, workspace=active.workspace, parent_digest=active.parent_digest),
            created_at=self._clock(),
            created_by=active.actor,
        )
        await self._unbroken(self._room.check_size(active.workspace, build.name, size=packed.size))
        node = self._scheduler.client(active.sandbox.node)
        self._storing.add(image)
        undo.push_async_callback(_quietly, lambda: node.delete_template(image))
        await self._during(active, "store", self._store(guest, node, image=image, packed=packed))
        # Its room is free for the try: the workspace may have no more than this one sandbox.
        await self._kill(active.sandbox, reason="its template is built")
        await self._during(active, "try", self._try(active, template, image=image))
        return template

    async def _step(self, active: _Active, guest: Guest, step: Step) -> Command:
        command_id = await guest.start(
            step.script, name=f"{WORK}/step-{step.name.replace(' ', '-')}", env=active.request.env
        )
        active.step(step.name, state=StepState.RUNNING, command=command_id)
        command = await guest.wait(command_id)
        if command.exit_code != 0:
            raise await step_failed(guest, command, build=active.build, step=step.name)
        active.step(step.name, state=StepState.DONE)
        return command

    async def _pack(self, active: _Active, guest: Guest) -> Packed:
        assert self._packer is not None
        for name, content in self._packer.files.items():
            await guest.put(f"{WORK}/{name}", content)
        step = pack_step(self._packer.loader, self._packer.program, max_mib=self._max_mib)
        command = await self._step(active, guest, step)
        output = await guest.output_end(command.id, stream="stdout", limit=_PACKED_OUTPUT)
        packed = read_packed(output)
        if packed is None:
            raise build_failed(active.build, "pack", "the build sandbox did not say what it made")
        if packed.size > self._max_mib << 20:
            raise too_large(active.build, f"it has {packed.size >> 20} MiB, and {self._max_mib} MiB are allowed")
        return packed

    async def _store(self, guest: Guest, node: Any, *, image: str, packed: Packed) -> None:
        async with guest.open(IMAGE) as content:
            await node.put_template(image, size=packed.size, sha256=packed.sha256, content=content)
        await self._scheduler.refresh()

    async def _try(self, active: _Active, template: TemplateInfo, *, image: str) -> None:
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
                await self._kill(created.result(), reason="the template was tried")

    async def _try_in(self, active: _Active, row: Row[Any], template: TemplateInfo) -> None:
        guest = self._gate.guest(row, actor=active.actor)
        command = await guest.wait(await guest.start("true", name="/tmp/try", user="root"))
        if command.exit_code != 0:
            raise await step_failed(guest, command, build=active.build, step="try")
        await begin(guest, template)

    # ends

    async def _during(self, active: _Active, name: str, work: Awaitable[Any]) -> None:
        active.step(name, state=StepState.RUNNING)
        await work
        active.step(name, state=StepState.DONE)

    async def _end(
        self,
        active: _Active,
        *,
        state: BuildState,
        template: TemplateInfo | None = None,
        error: CpuosError | None = None,
    ) -> None:
        active.settled = True
        if error is not None:
            running = active.running_step()
            if running is not None:
                active.step(running.name, state=StepState.FAILED)
            _log.info("build failed", build=active.build.id, what=error.what, why=error.why[-300:])
        await self._kill(active.sandbox, reason=f"its build is {state.value}")
        told = None if error is None else Error.model_validate(error.body()["error"])
        changes = {"state": state, "template": template, "error": told, "ended_at": self._clock()}
        active.build = active.build.model_copy(update=changes)
        async with self._database.write() as connection:
            await records.update_build(connection, active.build)
        self._active.pop(active.build.id, None)
        self._storing.discard(f"built-{active.build.id}")
        await _quietly(self.tidy)

    async def _end_left(self, build: Build) -> None:
        if build.sandbox is not None:
            async with self._database.read() as connection:
                row = await row_of(connection, build.sandbox)
            if row is not None:
                await self._kill(row, reason="its build was left by a server that ended")
        told = Error(code="build_failed", what=f"cannot build template {build.name!r}", why="the server was restarted")
        changes = {"state": BuildState.FAILED, "error": told, "ended_at": self._clock()}
        async with self._database.write() as connection:
            await records.update_build(connection, build.model_copy(update=changes))

    async def _unbroken(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Work on the database, which a cancel of the build does not cut short."""
        return await asyncio.shield(self._tasks.start(work))

    async def _kill(self, row: Row[Any], *, reason: str) -> None:
        try:
            await self._unbroken(self._lifecycle.kill(row, reason=reason))
        except CpuosError as error:
            _log.warning("build sandbox not ended yet", sandbox=row.id, why=str(error))  # its timeout ends it

    # what it needs

    async def _reuse(self, request: TemplateBuild, *, workspace: str, parent_digest: str) -> Build | None:
        key = build_key(request, workspace=workspace, parent_digest=parent_digest)
        async with self._database.write() as connection:
            row = await records.template_with_key(connection, workspace, key)
            if row is None or row.image not in self._names.images():
                return None
            template = TemplateInfo.model_validate(row.manifest).model_copy(update={"name": request.name})
            await records.put_template(connection, workspace=workspace, image=row.image, template=template)
            now = self._clock()
            steps = [step.model_copy(update={"state": StepState.DONE}) for step in steps_shown(request)]
            build = Build(
                id=new_id(),
                name=request.name,
                state=BuildState.READY,
                reused=True,
                steps=steps,
                template=template,
                created_at=now,
                ended_at=now,
            )
            await records.insert_build(connection, build, workspace=workspace, created_at=now)
        return build


def _cancel(active: _Active, *, by: str) -> None:
    # Once: a second would cut short what the first makes it tidy.
    if active.task is not None and not active.cancelled and not active.settled:
        active.cancelled = by
        active.task.cancel()


def _at(active: _Active) -> str:
    running = active.running_step()
    return running.name if running is not None else "upload"


async def _quietly(work: Callable[[], Awaitable[Any]]) -> None:
    try:
        await work()
    except CpuosError as error:
        _log.warning("template not tidied yet", why=str(error))
