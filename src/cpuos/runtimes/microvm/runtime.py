"""The microVM driver: each sandbox is a virtual machine in a jail, with the agent as first process of its kernel.

    run_dir/ID/vm.json   whose user the VMM is, and what it is   run_dir/ID/control   the VMM's socket
    run_dir/ID/root/     where its root is mounted, in its own mount namespace alone

The node's process looks into nothing that the guest has written: disks and memory are handed over as open files and
copied as bytes, and what the VMM says over its socket is lines of JSON and a stream, of bounded length.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import structlog

from cpuos.errors import NotFound, PlatformError
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import Capability, Probe, Process, RuntimeLimits, RuntimeStats, SandboxSpec
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.microvm.image import find_image
from cpuos.runtimes.microvm.launch import (
    CONTROL,
    Launch,
    drive_numbers,
    guest_arguments,
    guest_memory_mib,
    user_for,
)
from cpuos.runtimes.microvm.probe import Prober, candidates
from cpuos.runtimes.microvm.reports import Reports
from cpuos.runtimes.microvm.saved import (
    SAVES,
    STATE,
    Facts,
    kind_for,
    open_memory,
    read_facts,
    save,
    save_layer,
    save_machine,
    take_layer,
    write_facts,
)
from cpuos.runtimes.microvm.vmm import Drive, Machine, Memory, Vmm
from cpuos.runtimes.processes import find_process, open_process
from cpuos.types.sandbox import Isolation

__all__ = ["MicrovmRuntime"]

log = structlog.get_logger("cpuos.node")

GUEST_MAC = "02:00:0a:00:00:02"
TAP = "lan"
ROOT_IMAGE = "root.image"
_START_S = 45.0
_POLL_S = 0.01
_MESSAGE_BYTES = 4096
_NUMBERS = drive_numbers(5)
# Threads of a VMM: one for each CPU, and those that wait for its disks.
_VMM_TASKS = 128


@dataclass(frozen=True, kw_only=True)
class _Running:
    spec: SandboxSpec
    facts: Facts
    process: Process
    pidfd: int
    ended: asyncio.Future[str]
    reports: Reports | None
    """Of a VMM that writes some."""


class MicrovmRuntime:
    name: ClassVar[str] = "microvm"
    isolation: ClassVar[Isolation] = Isolation.MICROVM
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.OWN_KERNEL, Capability.PAUSE, Capability.SNAPSHOT, Capability.FILESYSTEM_CHECKPOINT}
    )

    def __init__(self, host: RuntimeHost) -> None:
        self._run_dir = host.run_dir
        self._image_dir = host.data_dir / "microvm"
        self._groups = ControlGroups(host.instance_id)
        vmms = candidates(host.programs, rates=host.rates)
        kept, work = host.state_dir / "probe.json", host.run_dir / "probe"
        self._prober = Prober(self._image_dir, kept=kept, folder=work, vmms=vmms)
        self._running: dict[str, _Running] = {}
        self._version = ""
        self._starts = asyncio.Lock()
        """Guards the choice of a user that no other machine has."""

    @property
    def image_version(self) -> str:
        return self._version or "not known yet"

    def version_of(self, sandbox_id: str) -> str:
        running = self._running.get(sandbox_id)
        return self.image_version if running is None else running.facts.version

    def takes(self, version: str) -> bool:
        # Until it is known what this host has, it is the restore that refuses.
        return self._version in ("", version)

    async def probe(self) -> Probe:
        found = await self._prober.probe()
        if found.available:
            await self._find_version(await self._prober.vmm())
        for one in self._prober.seen:
            log.info("microvm probed", vmm=one.vmm, kvm=one.kvm, works=one.works, evidence=one.evidence)
        return found

    async def start(self, spec: SandboxSpec, *, root: Path | None = None) -> Process:
        return await self._begin(spec, layer=root)

    async def restore(self, spec: SandboxSpec, *, image: Path) -> Process:
        return await self._begin(spec, image=image, layer=image)

    async def image_bytes(self, sandbox_id: str) -> int:
        running = self._found(sandbox_id, verb="save")
        layer = await asyncio.to_thread((running.spec.disk / ROOT_IMAGE).stat)
        copies = 2 if self._vmm_of(running.facts).saves_files else 1  # it writes a file of its own first
        return copies * (guest_memory_mib(running.spec.memory_mib) << 20) + layer.st_blocks * 512

    async def checkpoint(self, sandbox_id: str, *, image: Path) -> None:
        running = self._found(sandbox_id, verb="save")
        vmm = self._vmm_of(running.facts)
        control = self._run_dir / sandbox_id / CONTROL

        def write() -> None:
            disk = running.spec.disk / ROOT_IMAGE
            save_machine(image, vmm, running.facts, control=control, pidfd=running.pidfd, spec=running.spec, layer=disk)

        await asyncio.to_thread(save, sandbox_id, image, write)

    async def save_root(self, sandbox_id: str, *, image: Path) -> None:
        """Its guest is frozen, or what it has not written yet is not in it."""
        disk = self._found(sandbox_id, verb="save").spec.disk / ROOT_IMAGE
        await asyncio.to_thread(save, sandbox_id, image, lambda: save_layer(disk, image))

    async def save_dead_root(self, disk: Path, *, image: Path) -> None:
        await asyncio.to_thread(save, disk.name, image, lambda: save_layer(disk / ROOT_IMAGE, image))

    async def adopt(self, spec: SandboxSpec, process: Process) -> bool:
        pidfd = open_process(process)
        if pidfd is None or process.pid not in await asyncio.to_thread(self._groups.processes, spec.id):
            if pidfd is not None:
                os.close(pidfd)
            return False
        try:
            facts = await asyncio.to_thread(read_facts, self._run_dir / spec.id)
        except OSError as problem:
            os.close(pidfd)
            log.warning("sandbox not adopted: what it is is not known", sandbox=spec.id, why=str(problem))
            return False
        self._watch(spec, process, pidfd=pidfd, facts=facts)
        # A daemon that died while it saved this machine has left it standing still.
        try:
            vmm = self._vmm_of(facts)
            await asyncio.to_thread(vmm.go_on, self._run_dir / spec.id / CONTROL, timeout_s=_START_S)
        except (OSError, PlatformError) as problem:
            log.warning("machine not told to go on", sandbox=spec.id, why=str(problem))
        return True

    async def wait(self, sandbox_id: str) -> str:
        return await asyncio.shield(self._found(sandbox_id, verb="wait for").ended)

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
        self._found(sandbox_id, verb="measure")
        try:
            memory_bytes = self._groups.memory_bytes(sandbox_id)
            cpu_seconds = self._groups.cpu_seconds(sandbox_id)
        except OSError as problem:
            raise _not_found(sandbox_id, verb="measure") from problem
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
        """Which of them are reached only the guest's kernel knows: the gateway asks the agent."""
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

    async def _begin(self, spec: SandboxSpec, *, image: Path | None = None, layer: Path | None = None) -> Process:
        """`image`: a machine to take up; `layer`: what its root's layer begins as."""
        started = asyncio.get_running_loop().time()
        try:
            process = await self._start(spec, image=image, layer=layer)
        except BaseException:
            await asyncio.shield(self.destroy(spec.id))
            raise
        spent = asyncio.get_running_loop().time() - started
        word = "microvm started" if image is None else "microvm restored"
        log.info(word, sandbox=spec.id, version=self._version, ms=round(1e3 * spent, 1))
        return process

    async def _start(self, spec: SandboxSpec, *, image: Path | None, layer: Path | None) -> Process:
        vmm = await self._prober.vmm()
        version = await self._find_version(vmm)
        kind = Memory.SHARED
        if image is not None:
            kind = await asyncio.to_thread(kind_for, image, version=version)
        if layer is not None:
            await asyncio.to_thread(take_layer, layer, spec.disk / ROOT_IMAGE)
        folder = self._run_dir / spec.id
        async with self._starts:
            facts = await asyncio.to_thread(self._make_folder, folder, spec, kind)
        groups = await asyncio.to_thread(
            self._groups.create,
            spec.id,
            memory_mib=guest_memory_mib(spec.memory_mib) + vmm.overhead_mib(),
            cpu=spec.cpu,
            processes=_VMM_TASKS + spec.cpu,
        )
        memory = await asyncio.to_thread(
            open_memory, guest_memory_mib(spec.memory_mib), image if kind is Memory.PRIVATE else None
        )
        try:
            machine, plan = self._plan(spec, vmm, facts=facts, groups=groups, memory=memory, image=image)
            pid, output = await asyncio.to_thread(vmm.launch, plan, machine, control=folder / CONTROL)
        finally:
            os.close(memory)
        try:
            process = find_process(pid)
            pidfd = open_process(process) if process is not None else None
            if process is None or pidfd is None:
                _reap(pid)
                raise PlatformError(f"cannot start sandbox {spec.id}", f"its VMM ended at once: {_drain(output)}")
            self._watch(spec, process, pidfd=pidfd, facts=facts)
            await self._until_running(spec.id, vmm, machine, output=output)
        finally:
            # What a VMM has to say once its guest runs could be the guest's doing.
            os.close(output)
        return process

    async def _find_version(self, vmm: Vmm) -> str:
        """Of what is started now: VMM, devices, kernel and first root. Processors and memory are compared apart."""
        image = await asyncio.to_thread(find_image, self._image_dir)
        machine = _machine(arguments="", cpu=1, memory_mib=guest_memory_mib(256))
        known = await asyncio.to_thread(vmm.identity, machine)
        self._version = f"{known}-{hashlib.sha256(image.identity.encode()).hexdigest()[:12]}"
        return self._version

    def _plan(
        self, spec: SandboxSpec, vmm: Vmm, *, facts: Facts, groups: list[Path], memory: int, image: Path | None
    ) -> tuple[Machine, Launch]:
        find_image(self._image_dir)
        template, root, workspace, tap, control = _NUMBERS
        machine = _machine(
            arguments=guest_arguments(spec),
            cpu=spec.cpu,
            memory_mib=guest_memory_mib(spec.memory_mib),
        )
        machine = replace(machine, memory=facts.memory, saved=None if image is None else image / STATE)
        plan = Launch(
            name=spec.id,
            root=self._run_dir / spec.id / "root",
            boot=self._image_dir,
            uid=facts.uid,
            groups=tuple(groups),
            files={
                template: (spec.template_image, False),
                root: (spec.disk / ROOT_IMAGE, True),
                workspace: (spec.disk / "image", True),
            },
            tap=(tap, spec.netns, TAP),
            control=control,
            kvm=vmm.kvm,
            memory=memory,
            saves=spec.workdir / SAVES,
        )
        return machine, plan

    def _make_folder(self, folder: Path, spec: SandboxSpec, kind: Memory) -> Facts:
        (folder / "root").mkdir(mode=0o700, parents=True)
        facts = Facts(uid=user_for(spec.id, taken=self._users()), version=self._version, memory=kind)
        write_facts(folder, facts)
        return facts

    def _users(self) -> set[int]:
        """Those of all machines of this instance."""
        taken = set()
        for path in self._run_dir.glob("*/vm.json"):
            with contextlib.suppress(OSError):
                taken.add(read_facts(path.parent).uid)
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

    def _found(self, sandbox_id: str, *, verb: str) -> _Running:
        running = self._running.get(sandbox_id)
        if running is None:
            raise _not_found(sandbox_id, verb=verb)
        return running

    def _vmm_of(self, facts: Facts) -> Vmm:
        """What runs this machine, which need not be what is begun now."""
        name = facts.version.split(" ")[0]
        vmm = self._prober.named(name)
        if vmm is None:
            raise PlatformError("cannot reach a microVM", f"it runs in {name}, which this node knows no more")
        return vmm

    def _watch(self, spec: SandboxSpec, process: Process, *, pidfd: int, facts: Facts) -> None:
        loop = asyncio.get_running_loop()
        self._forget(spec.id)
        try:
            reports = Reports(self._run_dir / spec.id)
        except FileNotFoundError:
            reports = None
        self._running[spec.id] = _Running(
            spec=spec, facts=facts, process=process, pidfd=pidfd, ended=loop.create_future(), reports=reports
        )
        loop.add_reader(pidfd, self._ended, spec.id)

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


def _machine(*, arguments: str, cpu: int, memory_mib: int) -> Machine:
    template, root, workspace, tap, control = _NUMBERS
    return Machine(
        kernel="/boot/vmlinux",
        initrd="/boot/initrd",
        arguments=arguments,
        cpu=cpu,
        memory_mib=memory_mib,
        drives=(
            Drive(name="template", descriptor=template, writable=False),
            Drive(name="root", descriptor=root, writable=True),
            Drive(name="workspace", descriptor=workspace, writable=True),
        ),
        tap=tap,
        guest_mac=GUEST_MAC,
        control=control,
        memory=Memory.SHARED,
    )


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


def _not_found(sandbox_id: str, *, verb: str) -> NotFound:
    return NotFound(f"cannot {verb} sandbox {sandbox_id}", "it does not run here", code="sandbox_not_found")
