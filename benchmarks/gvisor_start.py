"""Where the time of a gVisor start goes, and what an idle sandbox weighs. Needs root and a set-up data directory.

    .venv/bin/python benchmarks/gvisor_start.py [COUNT]

Starts are interleaved with bare `runsc run -detach` of the same spec, disk and slot. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from structlog.testing import capture_logs

from cpuos.node import syscalls
from cpuos.node.network import NetworkSlots
from cpuos.node.storage import DiskStore
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.gvisor import GvisorRuntime
from cpuos.runtimes.gvisor.bundle import runsc_flags, write_bundle
from cpuos.runtimes.limits import ControlGroups
from cpuos.settings import load_settings

INSTANCE = "bench0"


class Bench:
    def __init__(self, folder: Path) -> None:
        self.settings = load_settings()
        self.folder = folder
        run_dir = folder / "gvisor"
        run_dir.mkdir()
        host = RuntimeHost(instance_id=INSTANCE, data_dir=self.settings.data_dir, state_dir=folder, run_dir=run_dir)
        self.root = run_dir / "root"
        self.disks = DiskStore(folder / "disks")
        self.slots = NetworkSlots(folder / "netns")
        self.runtime = GvisorRuntime(host)
        self.parts: dict[str, list[float]] = {}

    def note(self, name: str, since: float) -> None:
        self.parts.setdefault(name, []).append(1e3 * (time.perf_counter() - since))

    async def prepare(self, number: int) -> SandboxSpec:
        sandbox_id = f"{number:020d}"
        workdir = self.folder / "work" / sandbox_id
        workdir.mkdir(parents=True)
        since = time.perf_counter()
        disk = await self.disks.create(sandbox_id, size_mib=8192)
        self.note("disk", since)
        since = time.perf_counter()
        netns = await self.slots.take(sandbox_id)
        self.note("slot", since)
        return SandboxSpec(
            id=sandbox_id,
            generation=1,
            hostname="bench",
            cpu=2,
            memory_mib=2048,
            disk_mib=8192,
            max_processes=512,
            template_image=self.settings.template_dir / "python" / "root.erofs",
            workdir=workdir,
            disk=disk,
            netns=netns,
            agent=self.settings.agent_dir,
            node_public_key=b"k" * 32,
        )

    async def remove(self, spec: SandboxSpec) -> None:
        since = time.perf_counter()
        await self.runtime.destroy(spec.id)
        self.note("destroy", since)
        since = time.perf_counter()
        await self.slots.release(spec.id)
        await self.disks.remove(spec.id)
        self.note("remove slot and disk", since)
        shutil.rmtree(spec.workdir)

    async def until_agent_listens(self, spec: SandboxSpec) -> None:
        loop = asyncio.get_running_loop()
        while True:
            link = await self.slots.guest_link(spec.id)
            with link.socket:
                try:
                    await loop.sock_connect(link.socket, link.address)
                    return
                except ConnectionRefusedError:
                    await asyncio.sleep(0.002)

    async def ours(self, number: int) -> SandboxSpec:
        spec = await self.prepare(number)
        since = time.perf_counter()
        with capture_logs() as logs:
            await self.runtime.start(spec)
        self.note("start", since)
        for name, value in logs[-1]["ms"].items():
            self.parts.setdefault(f"start: {name}", []).append(value)
        await self.until_agent_listens(spec)
        self.note("start to agent", since)
        return spec

    async def bare(self, number: int) -> SandboxSpec:
        spec = await self.prepare(number)
        bundle = write_bundle(spec, cgroups_path=f"/cpuos-{INSTANCE}/{spec.id}")
        flags = runsc_flags(
            root=self.root, overlay=spec.disk / "overlay", log=spec.workdir / "log", panic_log=spec.workdir / "panic"
        )
        command = [str(self.settings.runsc_path), *flags, "run", "-detach", "-bundle", str(bundle), spec.id]
        since = time.perf_counter()
        null = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)  # noqa: ASYNC220 (nothing else runs)
        assert process.wait() == 0
        self.note("bare runsc run -detach", since)
        return spec


def pss_mib(folder: str) -> float:
    """Proportional memory of all host processes that name `folder`."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if folder in (entry / "cmdline").read_text() or folder in _parents_cmdline(entry):
                    total += sum(
                        int(line.split()[1])
                        for line in (entry / "smaps_rollup").read_text().splitlines()
                        if line.startswith("Pss:")
                    )
            except (OSError, ValueError):
                continue
    return total / 1024


def _parents_cmdline(entry: Path) -> str:
    """Stubs of the sentry have no command line of their own."""
    text = (entry / "stat").read_text()
    parent = text[text.rindex(")") + 2 :].split()[1]
    return Path(f"/proc/{parent}/cmdline").read_text()


async def measure(count: int) -> dict[str, object]:
    folder = Path(tempfile.mkdtemp(prefix="cpuos-bench-"))
    bench = Bench(folder)
    try:
        for number in range(count):
            await bench.remove(await bench.ours(2 * number))
            await bench.remove(await bench.bare(2 * number + 1))
        idle = [await bench.ours(1000 + number) for number in range(3)]
        await asyncio.sleep(3)
        weight = pss_mib(str(folder)) / len(idle)
        groups = [(await bench.runtime.stats(spec.id)).memory_bytes >> 20 for spec in idle]
        for spec in idle:
            await bench.remove(spec)
    finally:
        await bench.runtime.close()
        ControlGroups(INSTANCE).remove_parent()
        subprocess.run(["umount", str(bench.root / "null-netns")], check=False, capture_output=True)  # noqa: ASYNC221
        shutil.rmtree(folder)
    median = {name: round(statistics.median(values), 1) for name, values in bench.parts.items()}
    return {"count": count, "p50_ms": median, "idle_pss_mib": round(weight, 1), "idle_group_mib": groups}


def main() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print(json.dumps(asyncio.run(measure(count)), indent=2))


if __name__ == "__main__":
    main()
