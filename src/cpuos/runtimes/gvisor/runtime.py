"""GvisorRuntime: starts, watches, measures and ends sandboxes. See runtimes/base.py for what each verb promises."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import structlog

from cpuos.errors import CapacityExceeded, CpuosError, NotFound, PlatformError
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import Capability, Probe, Process, RuntimeLimits, RuntimeStats, SandboxSpec
from cpuos.runtimes.gvisor.bundle import (
    AGENT_TASKS,
    host_processes,
    layer_mib,
    runsc_flags,
    tmp_mib,
    write_bundle,
)
from cpuos.runtimes.gvisor.probe import probe_gvisor
from cpuos.runtimes.gvisor.program import Outcome, Runsc
from cpuos.runtimes.gvisor.urpc import ControlSocket, UrpcFailure
from cpuos.runtimes.gvisor.version import RUNSC_VERSION
from cpuos.runtimes.gvisor.watchdog import MemoryWatchdog, OomKill, VictimWorker
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.processes import find_process, open_process, unnamed_bytes
from cpuos.types.sandbox import Isolation

__all__ = ["GvisorRuntime"]

_START_S = 30.0
# More of them at the same time end no sooner, and each would take longer than it may.
_STARTS_PER_CPU, _LEAST_STARTS = 2, 4
_DELETE_S = 15.0
# Many GiB of memory on a slow volume.
_SAVE_S = 300.0
# File in an image, and in the work folder of a sandbox that was made from one.
_FIRST = "first-sandbox"
# The same of the version of runsc that the processes run under: only that takes them up again.
_VERSION = "runsc-version"
_KEPT_KILLS = 256
# The root's layer takes whole pieces: with less than this it refuses what is written.
_LAYER_ALMOST = 1 << 20
_PANIC_HEAD = 64 << 10
_PANIC = re.compile(r"^(panic:|fatal error:|SIG[A-Z]+:)", re.MULTILINE)
# runsc's state files: ID_sandbox:ID.state and .lock.
_STATE_FILE = re.compile(r"([a-z0-9]{20})_sandbox:\1\.(state|lock)")

log = structlog.get_logger("cpuos.node")


@dataclass(frozen=True, kw_only=True)
class _Running:
    process: Process
    pidfd: int
    workdir: Path
    overlay: Path
    first: str
    """The sandbox that its processes began in: its own cgroup, seen from inside, keeps that name."""
    version: str
    """Of the runsc that made it."""
    ended: asyncio.Future[str]


class GvisorRuntime:
    name: ClassVar[str] = "gvisor"
    isolation: ClassVar[Isolation] = Isolation.GVISOR
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PAUSE, Capability.SNAPSHOT, Capability.FILESYSTEM_CHECKPOINT, Capability.PACKS}
    )

    def __init__(self, host: RuntimeHost) -> None:
        self._run_dir = host.run_dir
        bin_dir = host.bin_dir or host.data_dir / "bin"
        self._programs = bin_dir / "runsc"
        self._runsc = Runsc(self._programs / RUNSC_VERSION / "runsc", root=host.run_dir / "root")
        self._runsc.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._groups = ControlGroups(host.instance_id)
        self._worker = VictimWorker()
        self._watchdog = MemoryWatchdog(self._groups, worker=self._worker, on_kill=self._note_kill)
        self._on_oom = host.on_oom
        self._starts = asyncio.Semaphore(max(_LEAST_STARTS, _STARTS_PER_CPU * len(os.sched_getaffinity(0))))
        self._running: dict[str, _Running] = {}
        self.oom_kills: deque[OomKill] = deque(maxlen=_KEPT_KILLS)
        """The latest processes that were killed for memory, oldest first."""

    async def probe(self) -> Probe:
        return await probe_gvisor(self._runsc, folder=self._run_dir)

    async def start(self, spec: SandboxSpec, *, root: Path | None = None) -> Process:
        """`root`: what `save_root` wrote."""
        return await self._begin(spec, root=root)

    async def restore(self, spec: SandboxSpec, *, image: Path) -> Process:
        return await self._begin(spec, memory=image)

    @property
    def image_version(self) -> str:
        return RUNSC_VERSION

    def version_of(self, sandbox_id: str) -> str:
        running = self._running.get(sandbox_id)
        return RUNSC_VERSION if running is None else running.version

    def takes(self, version: str) -> bool:
        return version == RUNSC_VERSION or ("/" not in version and self._of(version).program.is_file())

    def _of(self, version: str) -> Runsc:
        """That version, which is kept as long as something needs it."""
        if version == RUNSC_VERSION:
            return self._runsc
        return Runsc(self._programs / version / "runsc", root=self._runsc.root)

    async def image_bytes(self, sandbox_id: str) -> int:
        memory_bytes = (await self.stats(sandbox_id)).memory_bytes
        running = self._running[sandbox_id]
        # The root's layer is a file, and is saved with the memory and apart.
        return memory_bytes + 2 * await asyncio.to_thread(unnamed_bytes, running.process.pid, on=running.overlay)

    async def checkpoint(self, sandbox_id: str, *, image: Path) -> None:
        await self._save(sandbox_id, "checkpoint", image=image)

    async def save_root(self, sandbox_id: str, *, image: Path) -> None:
        await self._save(sandbox_id, "fscheckpoint", image=image)

    async def adopt(self, spec: SandboxSpec, process: Process) -> bool:
        if spec.id in self._running:
            return True
        pidfd = open_process(process)
        if pidfd is None:
            log.warning("sandbox not adopted: its process has ended", sandbox=spec.id, pid=process.pid)
            return False
        await self._worker.start()
        try:
            self._watch(spec, process, pidfd=pidfd)
        except FileNotFoundError as problem:
            log.warning("sandbox not adopted: its control group is gone", sandbox=spec.id, why=str(problem))
            self._forget(spec.id)
            return False
        return True

    async def wait(self, sandbox_id: str) -> str:
        running = self._running.get(sandbox_id)
        if running is None:
            raise _not_found("wait for", sandbox_id)
        return await asyncio.shield(running.ended)

    async def halt(self, sandbox_id: str) -> None:
        await asyncio.to_thread(self._groups.halt, sandbox_id)

    async def proceed(self, sandbox_id: str) -> None:
        await asyncio.to_thread(self._groups.proceed, sandbox_id)

    async def destroy(self, sandbox_id: str) -> None:
        await self._watchdog.unwatch(sandbox_id)
        with contextlib.suppress(OSError):
            self._groups.proceed(sandbox_id)  # a frozen process of cgroup v1 does not even die
        try:
            runsc = self._of(self.version_of(sandbox_id))
            outcome = await runsc.call("delete", "-force", sandbox_id, timeout_s=_DELETE_S)
            if outcome.returncode != 0:
                log.warning("runsc delete failed", sandbox=sandbox_id, output=outcome.output[-500:])
        except CpuosError as problem:
            log.warning("runsc delete failed", sandbox=sandbox_id, output=problem.why)
        try:
            await asyncio.to_thread(self._remove_traces, sandbox_id)
        except OSError as problem:
            raise PlatformError(f"cannot remove sandbox {sandbox_id}", str(problem)) from problem
        self._forget(sandbox_id)

    async def stats(self, sandbox_id: str) -> RuntimeStats:
        if sandbox_id not in self._running:
            raise _not_found("measure", sandbox_id)
        try:
            memory_bytes = self._groups.memory_bytes(sandbox_id)
            cpu_seconds = self._groups.cpu_seconds(sandbox_id)
        except OSError as problem:
            raise _not_found("measure", sandbox_id) from problem
        processes = await self._control(sandbox_id).count_processes()
        return RuntimeStats(memory_bytes=memory_bytes, cpu_seconds=cpu_seconds, processes=processes)

    def cpu_seconds(self, sandbox_id: str) -> float:
        return self._groups.cpu_seconds(sandbox_id)

    def host_processes(self, max_processes: int) -> int:
        return host_processes(max_processes)

    def layer_bytes(self, sandbox_id: str) -> int:
        running = self._running.get(sandbox_id)
        try:
            return unnamed_bytes(running.process.pid, on=running.overlay) if running is not None else 0
        except OSError:  # it has just ended
            return 0

    async def limits(self, spec: SandboxSpec) -> RuntimeLimits:
        if spec.id not in self._running:
            raise _not_found("measure", spec.id)
        held = await asyncio.to_thread(self.layer_bytes, spec.id)
        return RuntimeLimits(
            processes_full=await self._control(spec.id).processes_full(),
            root_full=held + _LAYER_ALMOST >= layer_mib(spec.disk_mib) << 20,
            tmp_bytes=tmp_mib(spec.memory_mib) << 20,
        )

    async def leftovers(self) -> list[str]:
        found = {match[1] for name in os.listdir(self._runsc.root) if (match := _STATE_FILE.fullmatch(name))}
        return sorted(found | set(await asyncio.to_thread(self._groups.list)))

    async def close(self) -> None:
        """Stop watching; sandboxes run on."""
        await self._watchdog.close()
        await self._worker.close()
        for sandbox_id in list(self._running):
            self._forget(sandbox_id)
        self._groups.remove_parent()

    def _control(self, sandbox_id: str) -> ControlSocket:
        running = self._running.get(sandbox_id)
        path = self._runsc.root / f"runsc-{sandbox_id}.sock"
        return ControlSocket(path, sandbox_id=sandbox_id, group=running.first if running is not None else sandbox_id)

    async def _save(self, sandbox_id: str, verb: str, *, image: Path) -> None:
        running = self._running.get(sandbox_id)
        if running is None:
            raise _not_found("save", sandbox_id)
        try:
            await asyncio.to_thread(image.mkdir, mode=0o700)
            arguments = ("-leave-running", "-image-path", str(image), sandbox_id)
            outcome = await self._of(running.version).call(verb, *arguments, timeout_s=_SAVE_S)
            if outcome.returncode != 0:
                raise _unsaved(sandbox_id, verb, outcome)
            await asyncio.to_thread((image / _FIRST).write_text, running.first)
            await asyncio.to_thread((image / _VERSION).write_text, running.version)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, image, ignore_errors=True)
            raise

    async def _begin(self, spec: SandboxSpec, *, memory: Path | None = None, root: Path | None = None) -> Process:
        try:
            return await self._start(spec, memory=memory, root=root)
        except BaseException:
            await self.destroy(spec.id)
            raise

    async def _start(self, spec: SandboxSpec, *, memory: Path | None, root: Path | None) -> Process:
        logs = spec.workdir / "runsc.log"
        pid_file = spec.workdir / "pid"
        flags = runsc_flags(
            root=self._runsc.root,
            overlay=spec.disk / "overlay",
            log=logs,
            panic_log=spec.workdir / "panic.log",
        )
        started = time.perf_counter()
        self._groups.prepare()
        version = RUNSC_VERSION
        if memory is not None:
            shutil.copyfile(memory / _FIRST, spec.workdir / _FIRST)
            version = _read_version(memory)
        else:
            (spec.workdir / _FIRST).unlink(missing_ok=True)
        (spec.workdir / _VERSION).write_text(version)
        runsc = self._of(version)
        bundle = write_bundle(spec, cgroups_path=self._groups.oci_path(spec.id))
        worker = asyncio.create_task(self._worker.start())
        prepared = time.perf_counter()
        async with self._starts:
            files = {"bundle": bundle, "pid_file": pid_file}
            status = await runsc.launch(
                spec.id, *_verb(memory, root), flags=flags, timeout_s=_START_S, idly=spec.idly, **files
            )
            if status == 0 and root is not None:
                status = (await runsc.call("start", spec.id, timeout_s=_START_S)).returncode
        await worker
        run = time.perf_counter()
        if status != 0:
            raise PlatformError(
                f"cannot start sandbox {spec.id}",
                f"runsc ended with {status}: {_last_error(logs)}",
                hint="cpuos doctor",
            )
        if spec.idly:
            self._groups.prefer(spec.id)
        process = find_process(int(pid_file.read_text()))
        pidfd = open_process(process) if process is not None else None
        if process is None or pidfd is None:
            raise PlatformError(f"cannot start sandbox {spec.id}", "its process ended at once")
        self._watch(spec, process, pidfd=pidfd)
        # The agent runs by now but takes no command before the node's identity statement: the limit is in time.
        await self._limit_processes(spec)
        ended = time.perf_counter()
        parts = {"prepare": prepared - started, "runsc": run - prepared, "limits": ended - run}
        word = "gvisor started" if memory is None else "gvisor restored"
        log.info(word, sandbox=spec.id, ms={name: round(1e3 * part, 1) for name, part in parts.items()})
        return process

    async def _limit_processes(self, spec: SandboxSpec) -> None:
        tasks = spec.max_processes + AGENT_TASKS
        try:
            await self._control(spec.id).set_process_limit(tasks)
        except UrpcFailure as problem:
            log.warning("control socket failed, asking runsc", sandbox=spec.id, why=problem.why)
            where = ("pids", f"/{self._running[spec.id].first}", "pids.max")
            runsc = self._of(self.version_of(spec.id))
            outcome = await runsc.call("write-control", spec.id, *where, str(tasks), timeout_s=5)
            if outcome.returncode != 0:
                raise

    def _watch(self, spec: SandboxSpec, process: Process, *, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        running = _Running(
            process=process,
            pidfd=pidfd,
            workdir=spec.workdir,
            overlay=spec.disk / "overlay",
            first=_read_first(spec),
            version=_read_version(spec.workdir),
            ended=loop.create_future(),
        )
        self._running[spec.id] = running
        loop.add_reader(pidfd, self._ended, spec.id)
        self._watchdog.watch(spec.id, limit_bytes=spec.memory_mib << 20, control=self._control(spec.id))

    def _ended(self, sandbox_id: str) -> None:
        running = self._running[sandbox_id]
        asyncio.get_running_loop().remove_reader(running.pidfd)
        if not running.ended.done():
            running.ended.set_result(self._reason(sandbox_id, running))

    def _reason(self, sandbox_id: str, running: _Running) -> str:
        if any(kill.sandbox_id == sandbox_id and kill.whole for kill in self.oom_kills):
            return "it was out of memory and no longer answered, so it was killed"
        if self._groups.was_oom_killed(sandbox_id):
            return "it reached its memory limit and the host's kernel killed it"
        panic = _panic(running.workdir / "panic.log")
        if panic:
            log.error("gVisor's kernel stopped with an error", sandbox=sandbox_id, panic=panic)
            return "gVisor's kernel stopped with an error; the node's log has its first lines"
        return "its process ended"

    def _forget(self, sandbox_id: str) -> None:
        running = self._running.pop(sandbox_id, None)
        if running is None:
            return
        asyncio.get_running_loop().remove_reader(running.pidfd)
        os.close(running.pidfd)
        if not running.ended.done():
            running.ended.set_result("it was ended by its node")

    def _note_kill(self, kill: OomKill) -> None:
        self.oom_kills.append(kill)
        if not kill.whole:
            self._on_oom(kill.sandbox_id, kill.pids)

    def _remove_traces(self, sandbox_id: str) -> None:
        """What `runsc delete` leaves where it could not do its work."""
        self._groups.kill(sandbox_id)
        self._groups.remove(sandbox_id)
        names = (f"{sandbox_id}_sandbox:{sandbox_id}.state", f"{sandbox_id}_sandbox:{sandbox_id}.lock")
        for name in (*names, f"runsc-{sandbox_id}.sock"):
            (self._runsc.root / name).unlink(missing_ok=True)


def _verb(memory: Path | None, root: Path | None) -> list[str]:
    """What makes the sandbox; only `create` takes a root."""
    if memory is not None:
        return ["restore", "-detach", "-image-path", str(memory)]
    return ["run", "-detach"] if root is None else ["create", "-fs-restore-image-path", str(root)]


def _unsaved(sandbox_id: str, verb: str, outcome: Outcome) -> CpuosError:
    what = f"cannot save sandbox {sandbox_id}"
    if "no space left on device" in outcome.output:
        return CapacityExceeded(what, "the node's data volume has no room")
    return PlatformError(what, f"runsc {verb} ended with {outcome.returncode}: {outcome.output[-500:]}")


def _read_first(spec: SandboxSpec) -> str:
    try:
        return (spec.workdir / _FIRST).read_text()
    except FileNotFoundError:
        return spec.id


def _read_version(folder: Path) -> str:
    try:
        return (folder / _VERSION).read_text()
    except FileNotFoundError:  # made before versions were written down
        return RUNSC_VERSION


def _panic(path: Path) -> str:
    """The first lines of the kernel's panic, if there was one: a guest can bring it to log other things there."""
    try:
        with path.open("rb") as file:
            text = file.read(_PANIC_HEAD).decode(errors="replace")
    except OSError:
        return ""
    found = _PANIC.search(text)
    return text[found.start() :][:2000].strip() if found else ""


def _last_error(logs: Path) -> str:
    """The last line that runsc wrote, cut to size."""
    try:
        with logs.open("rb") as file:
            file.seek(max(0, logs.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return "it left no log"
    try:
        return str(json.loads(lines[-1])["msg"])[:500]
    except (IndexError, ValueError, KeyError, TypeError):
        return (lines[-1] if lines else "it left no log")[:500]


def _not_found(verb: str, sandbox_id: str) -> NotFound:
    return NotFound(f"cannot {verb} sandbox {sandbox_id}", "it does not run here", code="sandbox_not_found")
