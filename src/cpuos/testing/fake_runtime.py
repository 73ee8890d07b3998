"""A runtime without isolation: its sandbox is a process of its own that runs the fake agent. For tests only."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

from cpuos.errors import PlatformError
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import Capability, Probe, Process, RuntimeStats, SandboxSpec
from cpuos.runtimes.processes import find_process, open_process
from cpuos.testing.fake_process import readable
from cpuos.testing.fake_resources import AGENT_SOCKET
from cpuos.types.sandbox import Isolation

__all__ = ["FakeRuntime"]

END_S = 5.0


class FakeRuntime:
    """Follows the Runtime contract with real processes, so that deaths, adoption and leftovers are real."""

    name: ClassVar[str] = "fake"
    isolation: ClassVar[Isolation] = Isolation.NONE
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self, host: RuntimeHost) -> None:
        self._folder = host.run_dir
        self._zygote: asyncio.subprocess.Process | None = None
        self._forking = asyncio.Lock()
        """Guards the zygote's one question and answer at a time."""

    async def probe(self) -> Probe:
        return Probe(available=True, isolation=Isolation.NONE, detail="fake runtime: no isolation, for tests")

    async def start(self, spec: SandboxSpec) -> Process:
        folder = self._folder / spec.id
        (folder / "root").mkdir(parents=True)
        (folder / "disk").symlink_to(spec.disk)
        ask = {
            "sandbox": spec.id,
            "node_key": base64.b64encode(spec.node_public_key).decode(),
            "socket": str(spec.netns / AGENT_SOCKET),
            "root": str(folder / "root"),
            "workspace": str(spec.disk / "workspace"),
            "log": str(folder / "log"),
        }
        answer = await self._fork(ask)
        if "pid" not in answer:
            await self.destroy(spec.id)
            raise PlatformError(f"cannot start sandbox: {spec.id}", str(answer.get("error")))
        pid = int(answer["pid"])
        process = find_process(pid) or Process(pid=pid, start_time=0)
        self._write_process(spec.id, process)
        return process

    async def adopt(self, spec: SandboxSpec, process: Process) -> bool:
        if find_process(process.pid) != process:
            return False
        self._write_process(spec.id, process)
        return True

    async def wait(self, sandbox_id: str) -> str:
        process = self._read_process(sandbox_id)
        if process is None:
            return "its process is gone"
        descriptor = open_process(process)
        if descriptor is not None:
            try:
                await readable(descriptor)
            finally:
                os.close(descriptor)
        return "its process ended"

    async def destroy(self, sandbox_id: str) -> None:
        process = self._read_process(sandbox_id)
        descriptor = open_process(process) if process is not None else None
        if descriptor is not None:
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                async with asyncio.timeout(END_S):
                    await readable(descriptor)
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
        await asyncio.to_thread(shutil.rmtree, self._folder / sandbox_id, ignore_errors=True)

    async def stats(self, sandbox_id: str) -> RuntimeStats:
        process = self._read_process(sandbox_id)
        if process is None:
            raise PlatformError(f"cannot measure sandbox: {sandbox_id}", "it does not run")
        return RuntimeStats(memory_bytes=_resident_bytes(process.pid), cpu_seconds=0.0, processes=1)

    async def leftovers(self) -> list[str]:
        return sorted(os.listdir(self._folder))

    async def close(self) -> None:
        """End the zygote; sandboxes live on."""
        if self._zygote is not None and self._zygote.stdin is not None:
            self._zygote.stdin.close()
            await self._zygote.wait()
            self._zygote = None

    async def _fork(self, ask: dict[str, str]) -> dict[str, Any]:
        async with self._forking:
            if self._zygote is None or self._zygote.returncode is not None:
                self._zygote = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "cpuos.testing.fake_guest",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
            assert self._zygote.stdin is not None
            assert self._zygote.stdout is not None
            self._zygote.stdin.write(json.dumps(ask).encode() + b"\n")
            await self._zygote.stdin.drain()
            return json.loads(await self._zygote.stdout.readline() or b"{}")

    def _write_process(self, sandbox_id: str, process: Process) -> None:
        text = json.dumps({"pid": process.pid, "start_time": process.start_time})
        (self._folder / sandbox_id / "process").write_text(text)

    def _read_process(self, sandbox_id: str) -> Process | None:
        try:
            return Process(**json.loads((self._folder / sandbox_id / "process").read_text()))
        except (FileNotFoundError, ValueError):
            return None


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
