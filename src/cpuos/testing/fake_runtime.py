"""A runtime without isolation: its sandbox is a process of its own that runs the fake agent. For tests only.

Its image of a paused sandbox is a file: the processes are stopped, and continued when they are taken up again. Another
sandbox that begins with an image gets the files of the root alone.
"""

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
from cpuos.runtimes.base import Capability, Probe, Process, RuntimeLimits, RuntimeStats, SandboxSpec
from cpuos.runtimes.processes import find_process, open_process
from cpuos.testing.fake_guest import PROGRAM_FOLDERS
from cpuos.testing.fake_process import readable
from cpuos.testing.fake_resources import AGENT_SOCKET
from cpuos.types.sandbox import Isolation

__all__ = ["FakeRuntime"]

END_S = 5.0
# Name of the folder in which the node makes the image of a pause; those of snapshots have others.
_PAUSE_PART = ".part-pause-"


class FakeRuntime:
    """Follows the Runtime contract with real processes, so that deaths, adoption and leftovers are real."""

    name: ClassVar[str] = "fake"
    isolation: ClassVar[Isolation] = Isolation.NONE
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PAUSE, Capability.SNAPSHOT, Capability.FILESYSTEM_CHECKPOINT}
    )
    image_version: ClassVar[str] = "1"

    def __init__(self, host: RuntimeHost) -> None:
        self._folder = host.run_dir
        self._stopped = host.run_dir.with_name(f"{host.run_dir.name}-stopped")
        """Folders of sandboxes whose processes wait to be taken up again."""
        self._zygote: asyncio.subprocess.Process | None = None
        self._forking = asyncio.Lock()
        """Guards the zygote's one question and answer at a time."""

    async def probe(self) -> Probe:
        return Probe(available=True, isolation=Isolation.NONE, detail="fake runtime: no isolation, for tests")

    async def start(self, spec: SandboxSpec, *, root: Path | None = None) -> Process:
        if (self._stopped / spec.id).exists():  # its processes are given up
            await self._end(self._stopped / spec.id)
        return await self._start(spec, root=root)

    async def save_root(self, sandbox_id: str, *, image: Path) -> None:
        await asyncio.to_thread(_copy_root, self._folder / sandbox_id / "root", image)

    def version_of(self, sandbox_id: str) -> str:
        return self.image_version

    def takes(self, version: str) -> bool:
        return version == self.image_version

    async def image_bytes(self, sandbox_id: str) -> int:
        return 0

    async def checkpoint(self, sandbox_id: str, *, image: Path) -> None:
        process = self._read_process(sandbox_id)
        if process is None or find_process(process.pid) != process:
            raise PlatformError(f"cannot save sandbox: {sandbox_id}", "it does not run")
        await asyncio.to_thread(self._save, self._folder / sandbox_id, image)

    def _save(self, folder: Path, image: Path) -> None:
        try:
            image.mkdir()
            _copy_root(folder / "root", image / "root")
            (image / "process").write_text((folder / "process").read_text())
            if image.parent.name.startswith(_PAUSE_PART):
                (folder / "image").write_text(str(image.parent.parent / image.parent.name.removeprefix(".part-")))
        except BaseException:
            shutil.rmtree(image, ignore_errors=True)
            raise

    async def restore(self, spec: SandboxSpec, *, image: Path) -> Process:
        stopped = self._stopped / spec.id
        if not (stopped / "process").exists() or (stopped / "process").read_text() != (image / "process").read_text():
            return await self._start(spec, root=image / "root")
        stopped.rename(self._folder / spec.id)
        process = self._read_process(spec.id)
        assert process is not None
        os.link(self._folder / spec.id / "socket", spec.netns / AGENT_SOCKET)
        # The agent alone: what it has frozen goes on when it is told who it is.
        os.kill(process.pid, signal.SIGCONT)
        return process

    async def _start(self, spec: SandboxSpec, *, root: Path | None = None) -> Process:
        folder = self._folder / spec.id
        folder.mkdir(parents=True)
        if root is None:
            # The guest fills it in its own time: what is saved before that is no empty root either.
            (folder / "root/etc").mkdir(parents=True)
            (folder / "root/etc/hostname").write_text(f"{spec.hostname}\n")
        else:
            await asyncio.to_thread(shutil.copytree, root, folder / "root", symlinks=True)
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
        (folder / "slot").symlink_to(spec.netns)
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

    async def halt(self, sandbox_id: str) -> None:
        self._signal(sandbox_id, signal.SIGSTOP)

    async def proceed(self, sandbox_id: str) -> None:
        self._signal(sandbox_id, signal.SIGCONT)

    def _signal(self, sandbox_id: str, number: signal.Signals) -> None:
        process = self._read_process(sandbox_id)
        if process is not None and find_process(process.pid) == process:
            _signal_all(process, number)

    async def destroy(self, sandbox_id: str) -> None:
        if self._stop(sandbox_id):
            return
        for folder in (self._folder / sandbox_id, self._stopped / sandbox_id):
            await self._end(folder)

    def _stop(self, sandbox_id: str) -> bool:
        """Only stop it, when the image of its pause is there; whether it is stopped then."""
        folder, stopped = self._folder / sandbox_id, self._stopped / sandbox_id
        process = self._read_process(sandbox_id)
        if process is None:
            return stopped.exists() and Path((stopped / "image").read_text()).exists()
        if not (folder / "image").exists() or not Path((folder / "image").read_text()).exists():
            return False
        if find_process(process.pid) != process:
            return False
        _signal_all(process, signal.SIGSTOP)
        self._stopped.mkdir(exist_ok=True)
        socket = folder / "slot" / AGENT_SOCKET
        if socket.exists() and not (folder / "socket").exists():
            os.link(socket, folder / "socket")
        folder.rename(stopped)
        return True

    async def _end(self, folder: Path) -> None:
        process = _read_process(folder)
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
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def stats(self, sandbox_id: str) -> RuntimeStats:
        process = self._read_process(sandbox_id)
        if process is None:
            raise PlatformError(f"cannot measure sandbox: {sandbox_id}", "it does not run")
        return RuntimeStats(
            memory_bytes=_resident_bytes(process.pid), cpu_seconds=_cpu_seconds(process.pid), processes=1
        )

    def cpu_seconds(self, sandbox_id: str) -> float:
        process = self._read_process(sandbox_id)
        if process is None:
            raise ProcessLookupError(sandbox_id)
        return _cpu_seconds(process.pid)

    def host_processes(self, max_processes: int) -> int:
        return max_processes

    def layer_bytes(self, sandbox_id: str) -> int:
        return 0

    async def limits(self, spec: SandboxSpec) -> RuntimeLimits:
        return RuntimeLimits()

    async def leftovers(self) -> list[str]:
        return sorted(set(os.listdir(self._folder)) | self._abandoned())

    def _abandoned(self) -> set[str]:
        """Stopped ones whose image is gone."""
        folders = list(self._stopped.iterdir()) if self._stopped.exists() else []
        return {folder.name for folder in folders if not Path((folder / "image").read_text()).exists()}

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
        return _read_process(self._folder / sandbox_id)


def _read_process(folder: Path) -> Process | None:
    try:
        return Process(**json.loads((folder / "process").read_text()))
    except (FileNotFoundError, ValueError):
        return None


def _copy_root(root: Path, target: Path) -> None:
    """All but what the host lends, and sockets and pipes, which live with their processes."""

    def without(folder: str, names: list[str]) -> list[str]:
        lent = {*PROGRAM_FOLDERS, "proc", "dev", "workspace"} if Path(folder) == root else set()
        return [name for name in names if name in lent or _is_special(Path(folder, name))]

    shutil.copytree(root, target, symlinks=True, ignore=without)
    for path in [root, *root.rglob("*")]:
        copied = target / path.relative_to(root)
        if copied.exists() and not copied.is_symlink() and os.geteuid() == 0:
            os.chown(copied, path.stat().st_uid, path.stat().st_gid)


def _is_special(path: Path) -> bool:
    return not (path.is_symlink() or path.is_dir() or path.is_file())


def _signal_all(process: Process, number: signal.Signals) -> None:
    """All processes of its PID namespace; itself alone where it has none of its own."""
    space = _pid_space(process.pid)
    own = space != _pid_space(os.getpid())
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (int(entry.name) == process.pid or (own and _pid_space(int(entry.name)) == space)):
            try:
                os.kill(int(entry.name), number)
            except ProcessLookupError:
                continue


def _pid_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _cpu_seconds(pid: int) -> float:
    """Of it and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
