"""The microVM driver: each sandbox is a virtual machine in a jail, with the agent as first process of its kernel.

    run_dir/ID/vm.json   whose user the VMM is          run_dir/ID/control   the VMM's socket
    run_dir/ID/root/     where its root is mounted, in its own mount namespace alone

The node's process opens nothing that the guest has written: the disks are handed over as open files, and what the VMM
says over its socket is a line of JSON of bounded length.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import structlog

from cpuos.errors import NotFound, PlatformError
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import Capability, Probe, Process, RuntimeLimits, RuntimeStats, SandboxSpec
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.microvm.image import find_image
from cpuos.runtimes.microvm.launch import CONTROL, Launch, drive_numbers, guest_arguments, user_for
from cpuos.runtimes.microvm.probe import Prober, candidates
from cpuos.runtimes.microvm.reports import Reports
from cpuos.runtimes.microvm.vmm import Drive, Machine, Vmm
from cpuos.runtimes.processes import find_process, open_process
from cpuos.types.sandbox import Isolation

__all__ = ["MicrovmRuntime"]

log = structlog.get_logger("cpuos.node")

GUEST_MAC = "02:00:0a:00:00:02"
TAP = "lan"
AGENT_TASKS = 48
"""Room for the agent's own threads on top of the sandbox's process limit."""
ROOT_IMAGE = "root.image"
_START_S = 45.0
_POLL_S = 0.01
_MESSAGE_BYTES = 4096
# Threads of a VMM: one for each CPU, and those that wait for its disks.
_VMM_TASKS = 128


@dataclass(kw_only=True)
class _Running:
    process: Process
    pidfd: int
    ended: asyncio.Future[str]
    reports: Reports | None
    """Of a VMM that writes some."""


class MicrovmRuntime:
    name: ClassVar[str] = "microvm"
    isolation: ClassVar[Isolation] = Isolation.MICROVM
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.OWN_KERNEL})
    image_version: ClassVar[str] = "files"
    """What is kept of a machine holds no memory: any version takes it."""

    def __init__(self, host: RuntimeHost) -> None:
        self._run_dir = host.run_dir
        self._image_dir = host.data_dir / "microvm"
        self._groups = ControlGroups(host.instance_id)
        vmms = candidates(host.programs, rates=host.rates)
        kept, work = host.state_dir / "probe.json", host.run_dir / "probe"
        self._prober = Prober(self._image_dir, kept=kept, folder=work, vmms=vmms)
        self._running: dict[str, _Running] = {}
        self._starts = asyncio.Lock()
        """Guards the choice of a user that no other machine has."""

    def version_of(self, sandbox_id: str) -> str:
        return self.image_version

    def takes(self, version: str) -> bool:
        return version == self.image_version

    async def probe(self) -> Probe:
        found = await self._prober.probe()
        for one in self._prober.seen:
            log.info("microvm probed", vmm=one.vmm, kvm=one.kvm, works=one.works, evidence=one.evidence)
        return found

    async def start(self, spec: SandboxSpec, *, root: Path | None = None) -> Process:
        try:
            return await self._start(spec)
        except BaseException:
            await asyncio.shield(self.destroy(spec.id))
            raise

    async def adopt(self, spec: SandboxSpec, process: Process) -> bool:
        pidfd = open_process(process)
        if pidfd is None or process.pid not in await asyncio.to_thread(self._groups.processes, spec.id):
            if pidfd is not None:
                os.close(pidfd)
            return False
        self._watch(spec.id, process, pidfd=pidfd)
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
        # From outside a machine is one process; how many run inside only its own kernel knows.
        return RuntimeStats(memory_bytes=memory_bytes, cpu_seconds=cpu_seconds, processes=1)

    def cpu_seconds(self, sandbox_id: str) -> float:
        return self._groups.cpu_seconds(sandbox_id)

    def host_processes(self, max_processes: int) -> int:
        """The guest's own are its kernel's; the host sees QEMU's threads."""
        return _VMM_TASKS

    def layer_bytes(self, sandbox_id: str) -> int:
        """Its root is on an image with a name."""
        return 0

    async def limits(self, spec: SandboxSpec) -> RuntimeLimits:
        """Only the guest's kernel knows which of its limits are reached, and it is not asked."""
        return RuntimeLimits(tmp_bytes=max(16, spec.memory_mib // 4) << 20)

    async def leftovers(self) -> list[str]:
        names = await asyncio.to_thread(os.listdir, self._run_dir)
        return sorted(name for name in names if len(name) == 20)

    async def close(self) -> None:
        """Stop watching; machines run on."""
        for sandbox_id in list(self._running):
            self._forget(sandbox_id)
        self._groups.remove_parent()

    # a start

    async def _start(self, spec: SandboxSpec) -> Process:
        started = asyncio.get_running_loop().time()
        vmm = await self._prober.vmm()
        folder = self._run_dir / spec.id
        async with self._starts:
            uid = await asyncio.to_thread(self._make_folder, folder, spec)
        groups = await asyncio.to_thread(
            self._groups.create,
            spec.id,
            memory_mib=spec.memory_mib + vmm.overhead_mib(),
            cpu=spec.cpu,
            processes=_VMM_TASKS + spec.cpu,
        )
        machine, plan = self._plan(spec, vmm, uid=uid, groups=groups)
        pid, output = await asyncio.to_thread(vmm.launch, plan, machine, control=folder / CONTROL)
        try:
            process = find_process(pid)
            pidfd = open_process(process) if process is not None else None
            if process is None or pidfd is None:
                _reap(pid)
                raise PlatformError(f"cannot start sandbox {spec.id}", f"its VMM ended at once: {_drain(output)}")
            self._watch(spec.id, process, pidfd=pidfd)
            await self._until_running(spec.id, vmm, machine, output=output)
        finally:
            # What a VMM has to say once its guest runs could be the guest's doing.
            os.close(output)
        spent = asyncio.get_running_loop().time() - started
        log.info("microvm started", sandbox=spec.id, vmm=vmm.name, kvm=vmm.kvm, ms=round(1e3 * spent, 1))
        return process

    def _plan(self, spec: SandboxSpec, vmm: Vmm, *, uid: int, groups: list[Path]) -> tuple[Machine, Launch]:
        find_image(self._image_dir)
        template, root, workspace, tap, control = drive_numbers(5)
        files = {
            template: (spec.template_image, False),
            root: (spec.disk / ROOT_IMAGE, True),
            workspace: (spec.disk / "image", True),
        }
        machine = Machine(
            kernel="/boot/vmlinux",
            initrd="/boot/initrd",
            arguments=guest_arguments(spec, tasks=spec.max_processes + AGENT_TASKS),
            cpu=spec.cpu,
            memory_mib=spec.memory_mib,
            drives=(
                Drive(name="template", descriptor=template, writable=False),
                Drive(name="root", descriptor=root, writable=True),
                Drive(name="workspace", descriptor=workspace, writable=True),
            ),
            tap=tap,
            guest_mac=GUEST_MAC,
            control=control,
        )
        plan = Launch(
            name=spec.id,
            root=self._run_dir / spec.id / "root",
            boot=self._image_dir,
            uid=uid,
            groups=tuple(groups),
            files=files,
            tap=(tap, spec.netns, TAP),
            control=control,
            kvm=vmm.kvm,
        )
        return machine, plan

    def _make_folder(self, folder: Path, spec: SandboxSpec) -> int:
        (folder / "root").mkdir(mode=0o700, parents=True)
        uid = user_for(spec.id, taken=self._users())
        (folder / "vm.json").write_text(json.dumps({"uid": uid}))
        return uid

    def _users(self) -> set[int]:
        """Those of all machines of this instance."""
        taken = set()
        for path in self._run_dir.glob("*/vm.json"):
            try:
                taken.add(int(json.loads(path.read_text())["uid"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return taken

    async def _until_running(self, sandbox_id: str, vmm: Vmm, machine: Machine, *, output: int) -> None:
        """The VMM answers, and says that its machine runs."""
        running, control = self._running[sandbox_id], self._run_dir / sandbox_id / CONTROL
        state = "it did not answer"
        try:
            async with asyncio.timeout(_START_S):
                try:
                    await _unless_ended(vmm.boot(control, machine), running.ended)
                except OSError as problem:
                    raise PlatformError(
                        f"cannot start sandbox {sandbox_id}", f"its VMM: {problem}; {await _said(output)}".strip("; ")
                    ) from problem
                while not running.ended.done():
                    try:
                        if (state := await vmm.ask_state(control, timeout_s=_START_S)) == "running":
                            return
                    except OSError as problem:
                        state = str(problem)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            pass
        why = f"its VMM does not run: {state}; {await _said(output)}".strip("; ")
        raise PlatformError(f"cannot start sandbox {sandbox_id}", why)

    # its life

    def _watch(self, sandbox_id: str, process: Process, *, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        self._forget(sandbox_id)
        try:
            reports = Reports(self._run_dir / sandbox_id)
        except FileNotFoundError:
            reports = None
        self._running[sandbox_id] = _Running(process=process, pidfd=pidfd, ended=loop.create_future(), reports=reports)
        loop.add_reader(pidfd, self._ended, sandbox_id)

    def _ended(self, sandbox_id: str) -> None:
        running = self._running[sandbox_id]
        asyncio.get_running_loop().remove_reader(running.pidfd)
        _reap(running.process.pid)
        if not running.ended.done():
            out = self._groups.was_oom_killed(sandbox_id)
            why = "its VMM reached its memory limit and the host's kernel killed it" if out else "its machine stopped"
            running.ended.set_result(why)
        if running.reports is not None:
            running.reports.catch_up()
            faults, said = running.reports.seccomp_faults(), running.reports.log_end()
            log.info("microvm ended", sandbox=sandbox_id, seccomp_faults=faults, vmm_said=said)

    def _forget(self, sandbox_id: str) -> None:
        running = self._running.pop(sandbox_id, None)
        if running is None:
            return
        asyncio.get_running_loop().remove_reader(running.pidfd)
        os.close(running.pidfd)
        if running.reports is not None:
            running.reports.close()
        _reap(running.process.pid)
        if not running.ended.done():
            running.ended.set_result("it was ended by its node")

    def _remove_traces(self, sandbox_id: str) -> None:
        try:
            self._groups.proceed(sandbox_id)  # a frozen process of cgroup v1 does not even die
        except OSError:
            pass
        self._groups.kill(sandbox_id)
        running = self._running.get(sandbox_id)
        if running is not None:
            _reap(running.process.pid)
        self._groups.remove(sandbox_id)
        try:
            shutil.rmtree(self._run_dir / sandbox_id)  # last: by it what is left has an owner
        except FileNotFoundError:
            pass


async def _unless_ended(work: Coroutine[Any, Any, None], ended: asyncio.Future[str]) -> None:
    """Do it, but for nothing once the process has ended."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()


async def _said(output: int) -> str:
    return await asyncio.to_thread(_drain, output)


def _drain(output: int) -> str:
    """The end of what it has said so far."""
    os.set_blocking(output, False)
    said = b""
    try:
        while piece := os.read(output, _MESSAGE_BYTES):
            said = (said + piece)[-_MESSAGE_BYTES:]
    except BlockingIOError:
        pass
    return said.decode(errors="replace").strip()[-500:]


def _reap(pid: int) -> None:
    """A child of this daemon leaves its number until it is asked for; of an earlier one's child somebody else does."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _not_found(verb: str, sandbox_id: str) -> NotFound:
    return NotFound(f"cannot {verb} sandbox {sandbox_id}", "it does not run here", code="sandbox_not_found")
