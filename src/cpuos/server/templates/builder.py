"""Builds: each in an ordinary sandbox of the workspace, which is all that a build's steps can reach.

The host sees of a build its commands' recorded output and, at the end, the image as bytes: it is copied to the node by
digest and size. Nothing of it is read or unpacked outside of sandboxes. Equal builds at once are one build (flights).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import structlog
from sqlalchemy import Row

from cpuos.errors import (
    AgentFailure,
    CapacityExceeded,
    Conflict,
    CpuosError,
    FileProblem,
    InvalidRequest,
    LimitReached,
    NotFound,
    PlatformError,
    SandboxGone,
    Unavailable,
)
from cpuos.scheduler.base import Scheduler
from cpuos.server.asks import new_id
from cpuos.server.clock import Clock
from cpuos.server.db import templates as records
from cpuos.server.db.database import Database
from cpuos.server.db.sandboxes import row_of
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.network import Networks
from cpuos.server.tasks import Tasks
from cpuos.server.templates.active import Active
from cpuos.server.templates.failures import build_failed, is_of_recipe, other_failed, took_too_long, was_cancelled
from cpuos.server.templates.flights import Flight, Flights
from cpuos.server.templates.guest import Gate
from cpuos.server.templates.layers import Layers
from cpuos.server.templates.names import TemplateNames
from cpuos.server.templates.recipe import build_key, steps_shown
from cpuos.server.templates.room import TemplateRoom
from cpuos.server.templates.runner import BUILD_LABEL, Runner, quietly
from cpuos.server.templates.starts import begin
from cpuos.types.error import Error
from cpuos.types.sandbox import Isolation, SandboxCreate
from cpuos.types.template import Build, BuildState, StepState, TemplateBuild, TemplateInfo

__all__ = ["BUILD_LABEL", "Builder"]

# The build ends its sandbox; the sandbox's own time is for what nobody ends.
_SANDBOX_MARGIN_S = 60.0
_TIDY_S = 300.0
_CLOSE_S = 5.0
_log = structlog.get_logger("cpuos.server.templates")

Begun = Callable[[str], None]


class Builder:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        networks: Networks,
        names: TemplateNames,
        layers: Layers,
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
        self._networks = networks
        self._names = names
        self.layers = layers
        self._tasks = tasks
        self._clock = clock
        self._gate = gate
        self._room = TemplateRoom(database, workspace_mib=workspace_mib)
        self._runner = Runner(
            database=database,
            scheduler=scheduler,
            lifecycle=lifecycle,
            layers=layers,
            room=self._room,
            tasks=tasks,
            clock=clock,
            gate=gate,
            max_mib=max_mib,
        )
        self._active: dict[str, Active] = {}
        self._flights = Flights()
        self._begun: dict[str, str] = {}
        """Builds that calls are about to begin, with their workspaces: let in, and not yet among the active ones."""
        self._storing: set[str] = set()
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
            active.cancel(by="the server, which stops")
        if building:
            await asyncio.wait([active.task for active in building if active.task], timeout=_CLOSE_S)
        await self._gate.aclose()

    # verbs

    async def create(
        self, request: TemplateBuild, *, workspace: str, actor: str, begun: Begun
    ) -> tuple[Build, Row[Any] | None]:
        """A build and its sandbox; none when the same was built before, and the build is ready then, or when the same
        is being built, which this one waits for."""
        if any(facts.name == request.name for facts in self._names.installed()):
            raise Conflict(
                f"cannot build template: the name {request.name!r} is taken",
                "a template of the installation has it",
                code="name_taken",
                hint="use another name",
                details={"field": "name", "value": request.name},
            )
        build_id = new_id()
        at_work = {one for one, active in self._active.items() if active.workspace == workspace}
        at_work |= {one for one, owner in self._begun.items() if owner == workspace}
        self._begun[build_id] = workspace  # before anything is waited for: calls at once count each other
        try:
            await self._room.check_counts(workspace, request.name, builds=len(at_work))
            return await self._create(build_id, request, workspace=workspace, actor=actor, begun=begun)
        finally:
            del self._begun[build_id]

    async def _create(
        self, build_id: str, request: TemplateBuild, *, workspace: str, actor: str, begun: Begun
    ) -> tuple[Build, Row[Any] | None]:
        parent = await self._names.get(workspace, request.from_)
        policy = await self._networks.workspace_policy(workspace)
        inputs = {"workspace": workspace, "parent_digest": parent.digest, "network": policy.model_dump_json()}
        key = build_key(request, **inputs)
        if not request.fresh:
            reused = await self._reuse(request, key, workspace=workspace)
            if reused is not None:
                return reused, None
        build = Build(
            id=build_id,
            name=request.name,
            state=BuildState.RUNNING,
            steps=steps_shown(request),
            created_at=self._clock(),
        )
        active = Active(build=build, request=request, actor=actor, sandbox=None, **inputs)
        # From here to the flight's own record nothing waits: of equal builds exactly one is the first.
        other = None if request.fresh else self._flights.find(key)
        if other is not None:
            await self._start(active, self._run(active, key, other=other))
            return build, None
        flight = self._flights.begin(key, request)
        try:
            await self._begin(active, begun=begun)
            await self._start(active, self._run(active, key, flight))
        except BaseException:
            self._flights.land(key, flight, None)
            self.layers.release(active)
            if active.sandbox is not None:
                await self._runner.kill(active.sandbox, reason="its build is not on record")
            raise
        return active.build, active.sandbox

    async def _begin(self, active: Active, *, begun: Begun) -> None:
        """Give it a sandbox, which begins where the first step comes that is not done yet."""
        request, workspace = active.request, active.workspace
        self.layers.hold(active)
        try:
            row = await self._from_layer(active, begun=begun)
            if row is None:
                row = await self._lifecycle.create(
                    self._wanted(active), workspace=workspace, actor=active.actor, begun=begun
                )
        except BaseException:
            self.layers.release(active)
            raise
        active.sandbox = row
        active.parent_digest = row.template_digest
        uploading = request.uploads and not active.cached
        state = BuildState.UPLOADING if uploading else BuildState.RUNNING
        active.build = active.build.model_copy(update={"sandbox": row.id, "state": state})
        if not uploading:
            active.uploaded.set()

    async def _from_layer(self, active: Active, *, begun: Begun) -> Row[Any] | None:
        """A sandbox with as many steps done as there are layers of; None: there are none that can be taken up."""
        if active.request.fresh:
            return None
        cached, origin = await self.layers.find(active.workspace, active.layers)
        if origin is None:
            return None
        wanted = self._wanted(active).model_copy(update={"snapshot": origin.id, "runtime": origin.runtime})
        try:
            row = await self._lifecycle.create(
                wanted, workspace=active.workspace, actor=active.actor, begun=begun, origin=origin
            )
        except (CapacityExceeded, LimitReached, Unavailable):
            raise
        except CpuosError as error:
            _log.warning("layer not usable", build=active.build.id, snapshot=origin.id, why=str(error))
            await self.layers.drop(active.workspace, origin.id)
            return None
        if row.reason:  # it tells what did not come back
            _log.warning("layer not whole", build=active.build.id, snapshot=origin.id, why=row.reason)
            await self.layers.drop(active.workspace, origin.id)
            await self._runner.kill(row, reason=row.reason)
            return None
        active.cached = cached
        return row

    def _wanted(self, active: Active) -> SandboxCreate:
        request = active.request
        return SandboxCreate(
            template=request.from_,
            cpu=request.cpu,
            memory_mib=request.memory_mib,
            disk_mib=request.disk_mib,
            timeout_s=request.timeout_s + _SANDBOX_MARGIN_S,
            labels={BUILD_LABEL: active.build.id},
            min_isolation=Isolation.EMULATED,  # the steps change the root that they see
        )

    async def _start(self, active: Active, work: Coroutine[Any, Any, None]) -> None:
        self._active[active.build.id] = active
        try:
            async with self._database.write() as connection:
                await records.insert_build(
                    connection, active.build, workspace=active.workspace, created_at=active.build.created_at
                )
        except BaseException:
            del self._active[active.build.id]
            work.close()
            raise
        active.task = self._tasks.start(work)

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
            active.cancel(by=by)
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
            await self._runner.kill(row, reason="what its template starts was not ready")
            raise

    async def _tidy_for_ever(self) -> None:
        while not self._stopping.is_set():
            await quietly(self.tidy)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TIDY_S):
                    await self._stopping.wait()

    async def tidy(self) -> None:
        """End what an earlier process left, and remove images that no name means and no sandbox runs from."""
        async with self._database.read() as connection:
            left = await records.open_builds(connection, except_for=set(self._active))
        for build in left:
            await self._end_left(build)
        await self.layers.tidy(installed={facts.digest for facts in self._names.installed()})
        kept = {*self._storing}
        images = set(self._names.images())
        async with self._database.read() as connection:
            kept |= await records.named_images(connection)
        for image in sorted(images - kept - self._storing):
            for view in self._scheduler.nodes():
                await self._scheduler.client(view.facts.node).delete_template(image)

    # the run of one build

    async def _run(
        self, active: Active, key: str, flight: Flight | None = None, *, other: Flight | None = None
    ) -> None:
        """`other` is of the equal build that is at work, which this one waits for."""
        image, of_recipe = f"built-{active.build.id}", False
        try:
            if other is not None:
                flight = await self._turn(active, key, other)
            if flight is not None and active.sandbox is None:
                await self._runner.to_its_end(self._begin_late(active))
            template = active.known or await self._work(active, image)
            if active.known is not None:
                active.reuse()
            await self._end(active, state=BuildState.READY, template=template)
        except asyncio.CancelledError:
            if not active.cancelled:
                raise  # the server ends: the next start says how this ended
            error = was_cancelled(active.build, active.at, by=active.cancelled)
            await self._end(active, state=BuildState.FAILED, error=error)
        except Exception as problem:
            error = await self._error_in_sandbox(active, problem)
            of_recipe = is_of_recipe(error)
            await self._end(active, state=BuildState.FAILED, error=error)
        finally:
            self._storing.discard(image)
            if flight is not None:
                self._flights.land(key, flight, active.build, of_recipe=of_recipe)

    async def _turn(self, active: Active, key: str, other: Flight | None) -> Flight | None:
        """Until an equal build has made it, and nothing is left to do, or this one is to do the work."""
        async with asyncio.timeout(active.request.timeout_s):
            while other is not None:
                ended = await other.landed()
                if ended is not None and ended.template is not None:
                    meant = self._meant(active.workspace, active.build.name, key=ended.template.key)
                    active.known = await self._runner.unbroken(meant)
                    if active.known is not None:
                        return None
                elif ended is not None and other.is_shared(active.request):
                    raise other_failed(active.build, ended)
                other = self._flights.find(key)
            return self._flights.begin(key, active.request)

    async def _begin_late(self, active: Active) -> None:
        """What it waited for came to nothing: it works itself. Its caller asks for the way into the sandbox."""
        await self._begin(active, begun=lambda sandbox_id: None)
        async with self._database.write() as connection:
            await records.update_build(connection, active.build)

    async def _work(self, active: Active, image: str) -> TemplateInfo:
        async with AsyncExitStack() as undo:
            async with asyncio.timeout(active.request.timeout_s):
                self._storing.add(image)
                template = await self._runner.work(active, image, known=self._known, undo=undo)
            active.settled = True
            if active.known is None:
                async with self._database.write() as connection:
                    named = {"workspace": active.workspace, "image": image, "template": template}
                    await records.put_template(connection, **named)
                undo.pop_all()
        return template

    async def _error_in_sandbox(self, active: Active, problem: Exception) -> CpuosError:
        at_work = active.sandbox is not None and active.at != "try"  # then it is ended by the build
        if isinstance(problem, CpuosError) and at_work:
            try:
                await self._runner.require_sandbox(active)
            except InvalidRequest as error:
                return error if "step" not in problem.details else problem
        error = self._error_of(active, problem)
        error.details.setdefault("step", active.at)
        return error

    def _error_of(self, active: Active, problem: Exception) -> CpuosError:
        if isinstance(problem, TimeoutError):
            return took_too_long(active.build, active.at, limit_s=active.request.timeout_s)
        if isinstance(problem, AgentFailure | FileProblem | SandboxGone):  # the build's own doing
            return build_failed(active.build, active.at, f"{problem.what}: {problem.why}")
        if isinstance(problem, CpuosError):
            return problem
        _log.error("build failed", build=active.build.id, exc_info=problem)
        return PlatformError("cannot build template: a fault of cpuOS", "the server's log has the details")

    # ends

    async def _end(
        self,
        active: Active,
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
        if active.sandbox is not None:
            await self._runner.kill(active.sandbox, reason=f"its build is {state.value}")
        self.layers.release(active)
        told = None if error is None else Error.model_validate(error.body()["error"])
        changes = {"state": state, "template": template, "error": told, "ended_at": self._clock()}
        active.build = active.build.model_copy(update=changes)
        async with self._database.write() as connection:
            await records.update_build(connection, active.build)
        self._active.pop(active.build.id, None)
        self._storing.discard(f"built-{active.build.id}")
        await quietly(self.tidy)

    async def _end_left(self, build: Build) -> None:
        if build.sandbox is not None:
            async with self._database.read() as connection:
                row = await row_of(connection, build.sandbox)
            if row is not None:
                await self._runner.kill(row, reason="its build was left by a server that ended")
        told = Error(code="build_failed", what=f"cannot build template {build.name!r}", why="the server was restarted")
        changes = {"state": BuildState.FAILED, "error": told, "ended_at": self._clock()}
        async with self._database.write() as connection:
            await records.update_build(connection, build.model_copy(update=changes))

    # what was built before

    async def _reuse(self, request: TemplateBuild, key: str, *, workspace: str) -> Build | None:
        template = await self._meant(workspace, request.name, key=key)
        if template is None:
            return None
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
        async with self._database.write() as connection:
            await records.insert_build(connection, build, workspace=workspace, created_at=now)
        return build

    async def _known(self, active: Active) -> TemplateInfo | None:
        return await self._meant(active.workspace, active.build.name, key=active.key)

    async def _meant(self, workspace: str, name: str, *, key: str) -> TemplateInfo | None:
        """The name means from now on what was made of exactly these inputs; None: nothing was."""
        async with self._database.write() as connection:
            row = await records.template_with_key(connection, workspace, key)
            if row is None or row.image not in self._names.images():
                return None
            template = TemplateInfo.model_validate(row.manifest).model_copy(update={"name": name})
            await records.put_template(connection, workspace=workspace, image=row.image, template=template)
        return template
