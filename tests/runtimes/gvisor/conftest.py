"""Real sandboxes on this host, and a check after each test that nothing of them is left."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cpuos.node import syscalls
from cpuos.node.storage import DiskStore
from cpuos.node.storage.loop import loops_below
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import Process, SandboxSpec
from cpuos.runtimes.gvisor import GvisorRuntime
from cpuos.runtimes.limits import ControlGroups
from cpuos.settings import load_settings
from cpuos.testing.loose_slots import LooseSlots

CLONE_FS = 0x00000200  # linux/sched.h
INSTANCE = "test" + f"{os.getpid() % 0xFFFF:04x}"
# PID 1 of these tests: ignores its children's ends, so that the kernel reaps them.
PID_ONE = '#!/bin/bash\ntrap "" CHLD\nexec sleep infinity\n'


@dataclass(kw_only=True)
class Guest:
    """One running sandbox."""

    machine: Machine
    spec: SandboxSpec
    process: Process
    link_kept: list[object] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.spec.id

    async def run(self, command: str, *, timeout_s: float = 60, user: str = "0:0") -> str:
        """Run a shell command through runsc itself and give its output."""
        return (await self.try_run(command, timeout_s=timeout_s, user=user))[1]

    def workdir_bytes(self) -> int:
        """Size of all that the runtime keeps in the sandbox's folder on the host."""
        return sum(path.stat().st_size for path in self.spec.workdir.rglob("*") if path.is_file())

    async def try_run(self, command: str, *, timeout_s: float = 60, user: str = "0:0") -> tuple[int, str]:
        runsc = self.machine.runtime._runsc
        outcome = await runsc.call("exec", "-user", user, self.id, "bash", "-c", command, timeout_s=timeout_s)
        return outcome.returncode, outcome.output


class Machine:
    """Disks, slots and the runtime of one throw-away instance."""

    def __init__(self, folder: Path, *, data_dir: Path, image: Path) -> None:
        self.folder = folder
        self.image = image
        run_dir = folder / "run" / "gvisor"
        run_dir.mkdir(parents=True, exist_ok=True)
        self.host = RuntimeHost(instance_id=INSTANCE, data_dir=data_dir, state_dir=folder, run_dir=run_dir)
        self.disks = DiskStore(folder / "disks")
        self.slots = LooseSlots(folder / "run" / "netns")
        self.runtime = GvisorRuntime(self.host)
        self.agent = folder / "agent"
        self.agent.mkdir(exist_ok=True)
        (self.agent / "cpuos-agent").write_text(PID_ONE)
        (self.agent / "cpuos-agent").chmod(0o755)

    async def prepare(self, number: int, **changes: object) -> SandboxSpec:
        sandbox_id = f"{number:020d}"
        workdir = self.folder / "work" / sandbox_id
        workdir.mkdir(parents=True, mode=0o700, exist_ok=True)
        values: dict[str, object] = {
            "id": sandbox_id,
            "generation": 1,
            "hostname": f"box-{number}",
            "cpu": 2,
            "memory_mib": 512,
            "disk_mib": 256,
            "max_processes": 100,
            "template_image": self.image,
            "workdir": workdir,
            "agent": self.agent,
            "node_public_key": b"k" * 32,
        }
        values |= changes
        values["disk"] = await self.disks.create(sandbox_id, size_mib=int(str(values["disk_mib"])))
        values["netns"] = await self.slots.take(sandbox_id)
        return SandboxSpec(**values)  # type: ignore[arg-type]

    async def take_away(self, sandbox_id: str) -> None:
        await self.runtime.destroy(sandbox_id)
        await self.slots.release(sandbox_id)
        await self.disks.remove(sandbox_id)

    @asynccontextmanager
    async def guest(self, number: int = 1, **changes: object) -> AsyncIterator[Guest]:
        spec = await self.prepare(number, **changes)
        try:
            yield Guest(machine=self, spec=spec, process=await self.runtime.start(spec))
        finally:
            await self.take_away(spec.id)

    async def traces(self) -> dict[str, object]:
        """All that sandboxes of this instance leave on the host."""
        return {
            "mounts": mounts_below(self.folder),
            "loops": loops_below(self.folder),
            "slots": await self.slots.leftovers(),
            "disks": await self.disks.leftovers(),
            "runtime": await self.runtime.leftovers(),
            "groups": ControlGroups(INSTANCE).list(),
            "processes": processes_naming(str(self.folder)),
        }


def mounts_below(folder: Path) -> list[str]:
    """Mount points below `folder`, but for the one that gVisor's gofers share."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [mount for mount in mounts if str(folder) in mount and "null-netns" not in mount]


def processes_naming(text: str) -> list[str]:
    """Command lines of host processes that name `text`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(line)
    return found


@pytest.fixture(scope="session")
def template_image() -> Path:
    settings = load_settings()
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if not settings.runsc_path.exists():
        pytest.skip(f"needs runsc at {settings.runsc_path}")
    for name in ("base", "python"):
        image = settings.template_dir / name / "root.erofs"
        if image.exists():
            return image.resolve()
    pytest.skip(f"needs a template in {settings.template_dir}")


@pytest.fixture(scope="module")
def _own_mounts(template_image: Path) -> Iterator[None]:
    """Mounts of these tests are their own; other tests of this process find the machine's again."""
    before, folder = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), os.getcwd()
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
    yield
    syscalls.unshare(CLONE_FS)  # threads of these tests that live on would keep this one from leaving
    syscalls.setns(before, syscalls.CLONE_NEWNS)
    os.close(before)
    os.chdir(folder)


@pytest.fixture
async def machine(template_image: Path, _own_mounts: None, tmp_path: Path) -> AsyncIterator[Machine]:
    machine = Machine(tmp_path, data_dir=load_settings().data_dir, image=template_image)
    yield machine
    left = await machine.traces()
    await machine.runtime.close()
    assert not any(left.values()), left


@pytest.fixture(scope="session", autouse=True)
def _no_groups_left() -> Iterator[None]:
    yield
    ControlGroups(INSTANCE).remove_parent()
