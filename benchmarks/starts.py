"""Starts: the product's against bare `runsc run -detach` with the same bundle, flags, disk and network slot.

`python -m benchmarks.starts [COUNT]` tells where the time of the node's own part goes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from structlog.testing import capture_logs

from benchmarks.bare import run_detached
from benchmarks.results import Measured, compare_times
from benchmarks.stage import Stage, put_first
from cpuos import Sandbox
from cpuos.node import syscalls
from cpuos.node.storage import DiskStore
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.gvisor import GvisorRuntime
from cpuos.runtimes.gvisor.bundle import runsc_flags, write_bundle
from cpuos.runtimes.limits import ControlGroups
from cpuos.settings import load_settings
from cpuos.testing.loose_slots import LooseSlots
from cpuos.types.sandbox import SandboxCreate

__all__ = ["BareStarts", "bare_starts", "create_to_first_exec"]

_INSTANCE = "bench0"


def _enter_own_mounts() -> None:
    """A mount namespace of this process's own, for the bare sandboxes' disks. Before there are threads."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)


def create_to_first_exec(stage: Stage) -> Measured:
    """Cold, and each alone on the host: what was made is removed before the next turn."""
    product, bare = [], []
    with bare_starts(stage.folder) as start_bare:
        for _ in range(3 * stage.rounds + 1):
            since = time.perf_counter()
            sandbox = Sandbox.create(client=stage.client)
            try:
                sandbox.exec(["true"], check=True)
                product.append(time.perf_counter() - since)
            finally:
                sandbox.kill()
            bare.append(start_bare())
    return compare_times(product[1:], bare[1:])  # the first turn fills the page cache


@contextmanager
def bare_starts(folder: Path, *, exec_too: bool = False) -> Iterator[Callable[[], float]]:
    """A process beside this one, in a mount namespace of its own; each call is one start's seconds, with `exec_too` to
    the end of a first `runsc exec`."""
    command = [sys.executable, "-m", "benchmarks.starts", "--serve-exec" if exec_too else "--serve", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def start() -> float:
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        yield start
        process.stdin.close()
        if process.wait() != 0:
            raise RuntimeError("the bare starts did not end in order")


def _serve(folder: Path, *, exec_too: bool) -> None:
    with BareStarts(folder) as starts, asyncio.Runner() as runner:
        for turn, _ in enumerate(sys.stdin):
            print(runner.run(_bare_turn(starts, turn, exec_too=exec_too)), flush=True)


async def _bare_turn(starts: BareStarts, turn: int, *, exec_too: bool = False) -> float:
    spec = await starts.prepare(turn)
    try:
        return await starts.run_bare(spec) + (starts.exec_bare(spec) if exec_too else 0.0)
    finally:
        await starts.remove(spec)


class BareStarts:
    """Makes what a start needs beforehand, and times only the start."""

    def __init__(self, folder: Path) -> None:
        self._settings = load_settings()
        self.folder = folder
        host = RuntimeHost(
            instance_id=_INSTANCE, data_dir=self._settings.data_dir, state_dir=folder, run_dir=folder / "gvisor"
        )
        self._root = host.run_dir / "root"
        self._disks = DiskStore(folder / "disks")
        self._slots = LooseSlots(folder / "netns")
        self._groups = ControlGroups(_INSTANCE)
        self.runtime = GvisorRuntime(host)
        self.parts_ms: dict[str, list[float]] = {}

    def __enter__(self) -> BareStarts:
        self._groups.prepare()
        put_first(_INSTANCE)
        return self

    def __exit__(self, *exc: object) -> None:
        self._groups.remove_parent()
        subprocess.run(["umount", str(self._root / "null-netns")], check=False, capture_output=True)

    async def prepare(self, number: int) -> SandboxSpec:
        """Disk, slot and folder of a sandbox of the default size."""
        sandbox_id = f"{number:020d}"
        workdir = self.folder / "work" / sandbox_id
        workdir.mkdir(parents=True)
        size = SandboxCreate()
        with self._noted("disk"):
            disk = await self._disks.create(sandbox_id, size_mib=size.disk_mib)
        with self._noted("slot"):
            netns = await self._slots.take(sandbox_id)
        return SandboxSpec(
            id=sandbox_id,
            generation=1,
            hostname="bench",
            cpu=size.cpu,
            memory_mib=size.memory_mib,
            disk_mib=size.disk_mib,
            max_processes=size.max_processes,
            template_image=self._settings.template_dir / size.template / "root.erofs",
            workdir=workdir,
            disk=disk,
            netns=netns,
            agent=self._settings.agent_dir,
            node_public_key=b"k" * 32,
        )

    async def run_bare(self, spec: SandboxSpec) -> float:
        """Seconds of `runsc run -detach`, which returns when the sandbox runs."""
        bundle = write_bundle(spec, cgroups_path=self._groups.oci_path(spec.id))
        logs = {"log": spec.workdir / "log", "panic_log": spec.workdir / "panic"}
        flags = runsc_flags(root=self._root, overlay=spec.disk / "overlay", **logs)
        command = [str(self._settings.runsc_path), *flags, "run", "-detach", "-bundle", str(bundle), spec.id]
        since = time.perf_counter()
        run_detached(command)
        return time.perf_counter() - since

    def exec_bare(self, spec: SandboxSpec) -> float:
        """Seconds of `runsc exec` of the smallest program."""
        command = [str(self._settings.runsc_path), "--root", str(self._root), "exec", spec.id, "/bin/true"]
        since = time.perf_counter()
        run_detached(command)
        return time.perf_counter() - since

    async def remove(self, spec: SandboxSpec) -> None:
        with self._noted("destroy"):
            await self.runtime.destroy(spec.id)
        with self._noted("remove slot and disk"):
            await self._slots.release(spec.id)
            await self._disks.remove(spec.id)
        shutil.rmtree(spec.workdir)

    async def run_product(self, spec: SandboxSpec) -> None:
        """The node's own start, by parts, until the agent listens."""
        with self._noted("start to agent"):
            with self._noted("start"), capture_logs() as logs:
                await self.runtime.start(spec)
            await self._until_agent_listens(spec)
        for name, value in logs[-1]["ms"].items():
            self.parts_ms.setdefault(f"start: {name}", []).append(value)

    async def _until_agent_listens(self, spec: SandboxSpec) -> None:
        loop = asyncio.get_running_loop()
        while True:
            link = await self._slots.guest_link(spec.id)
            with link.socket:
                try:
                    await loop.sock_connect(link.socket, link.address)
                    return
                except ConnectionRefusedError:
                    await asyncio.sleep(0.002)

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.parts_ms.setdefault(name, []).append(1e3 * (time.perf_counter() - since))


async def _break_down(starts: BareStarts, count: int) -> dict[str, float]:
    """p50 of each part in milliseconds, product and bare in turns."""
    bare = []
    for number in range(count):
        spec = await starts.prepare(2 * number)
        await starts.run_product(spec)
        await starts.remove(spec)
        bare.append(1e3 * await _bare_turn(starts, 2 * number + 1))
    await starts.runtime.close()
    parts = {**starts.parts_ms, "bare runsc run -detach": bare}
    return {name: round(statistics.median(values), 1) for name, values in parts.items()}


def main() -> None:
    """`python -m benchmarks.starts`."""
    _enter_own_mounts()
    if sys.argv[1:2] in (["--serve"], ["--serve-exec"]):
        _serve(Path(sys.argv[2]), exec_too=sys.argv[1] == "--serve-exec")
        return
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory(prefix="cpuos-bench-") as folder, BareStarts(Path(folder)) as starts:
        print(json.dumps(asyncio.run(_break_down(starts, count)), indent=2))


if __name__ == "__main__":
    main()
