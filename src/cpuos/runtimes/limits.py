"""Control groups of sandboxes on the host, v1 and v2: where they are, what they measure, how they end.

The runtime's own program makes the groups (runsc from its spec); this module reads, kills and removes them. Every
sandbox has one group `cpuos-INSTANCE/ID` in each hierarchy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from cpuos.runtimes.descriptors import move_up

__all__ = ["ControlGroups", "MemoryGauge"]

_ROOT = Path("/sys/fs/cgroup")
_CPU_PERIOD_US = 100_000
_END_S = 3.0
_STEP_S = 0.005
_LOOKS = 10


@dataclass(frozen=True, kw_only=True)
class _Names:
    """What the two versions call the same things."""

    memory: str
    memory_events: str
    cache_key: bytes
    shmem_key: bytes


_V1 = _Names(
    memory="memory.usage_in_bytes",
    memory_events="memory.oom_control",
    cache_key=b"total_cache ",
    shmem_key=b"total_shmem ",
)
_V2 = _Names(memory="memory.current", memory_events="memory.events", cache_key=b"file ", shmem_key=b"shmem ")


class ControlGroups:
    """The groups of one instance. Blocking, but for `kill` and `remove` each call is a few file reads."""

    def __init__(self, instance_id: str, *, root: Path = _ROOT) -> None:
        self._root = root
        self._parent = f"cpuos-{instance_id}"
        self.version = 2 if (root / "cgroup.controllers").exists() else 1
        self._names = _V2 if self.version == 2 else _V1

    def oci_path(self, sandbox_id: str) -> str:
        """`linux.cgroupsPath` of the sandbox's spec."""
        return f"/{self._parent}/{sandbox_id}"

    def prepare(self) -> None:
        """Make the parent groups, so that the first sandbox does not own and remove what the others need."""
        for hierarchy in self._hierarchies():
            parent = hierarchy / self._parent
            try:
                parent.mkdir(exist_ok=True)
                self._fill_cpuset(parent)
            except OSError:
                continue  # a hierarchy that takes no groups: runsc says so if it is needed

    def create(self, sandbox_id: str, *, memory_mib: int, cpu: int, processes: int) -> list[Path]:
        """Make the groups of a sandbox with these limits; a process enters them by `cgroup.procs`. For runtimes whose
        program makes none itself. There already is fine."""
        self.prepare()
        made = []
        if self.version == 2:
            for above in (self._root, self._root / self._parent):
                (above / "cgroup.subtree_control").write_text("+cpu +memory +pids")
        for hierarchy in self._hierarchies():
            group = hierarchy / self._parent / sandbox_id
            try:
                group.mkdir(exist_ok=True)
            except OSError:
                continue  # a hierarchy that takes no groups
            self._fill_cpuset(group)
            made.append(group)
        for controller, name, value in self._values(memory_mib=memory_mib, cpu=cpu, processes=processes):
            (self._group(controller, sandbox_id) / name).write_text(value)
        return made

    def _values(self, *, memory_mib: int, cpu: int, processes: int) -> list[tuple[str, str, str]]:
        memory, quota = str(memory_mib << 20), str(cpu * _CPU_PERIOD_US)
        if self.version == 2:
            return [
                ("memory", "memory.max", memory),
                ("cpu", "cpu.max", f"{quota} {_CPU_PERIOD_US}"),
                ("cpu", "cpu.weight", str(min(100 * cpu, 10_000))),
                ("pids", "pids.max", str(processes)),
            ]
        return [
            ("memory", "memory.limit_in_bytes", memory),
            ("cpu", "cpu.cfs_period_us", str(_CPU_PERIOD_US)),
            ("cpu", "cpu.cfs_quota_us", quota),
            ("cpu", "cpu.shares", str(min(1024 * cpu, 262144))),
            ("pids", "pids.max", str(processes)),
        ]

    def list(self) -> list[str]:
        """Ids of all sandboxes with a group left."""
        found = set()
        for hierarchy in self._hierarchies():
            try:
                found |= {entry.name for entry in (hierarchy / self._parent).iterdir() if entry.is_dir()}
            except OSError:
                continue
        return sorted(found)

    def gauge(self, sandbox_id: str) -> MemoryGauge:
        """Open the memory files of a sandbox for reading them often; close it."""
        return MemoryGauge(self._group("memory", sandbox_id), names=self._names)

    def memory_bytes(self, sandbox_id: str) -> int:
        """What its gauge reads now."""
        gauge = self.gauge(sandbox_id)
        try:
            return gauge.read()
        finally:
            gauge.close()

    def cpu_seconds(self, sandbox_id: str) -> float:
        if self.version == 1:
            return int((self._group("cpuacct", sandbox_id) / "cpuacct.usage").read_text()) / 1e9
        text = (self._group("cpu", sandbox_id) / "cpu.stat").read_bytes()
        return _value(text, b"usage_usec ") / 1e6

    def was_oom_killed(self, sandbox_id: str) -> bool:
        """Whether the host's kernel killed something in the group for want of memory."""
        try:
            text = (self._group("memory", sandbox_id) / self._names.memory_events).read_bytes()
        except OSError:
            return False
        return _value(text, b"oom_kill ") > 0

    def processes(self, sandbox_id: str) -> set[int]:
        """Host processes in any of the sandbox's groups."""
        found: set[int] = set()
        for group in self._groups(sandbox_id):
            try:
                found |= {int(line) for line in (group / "cgroup.procs").read_text().split()}
            except OSError:
                continue
        return found

    def prefer(self, sandbox_id: str) -> None:
        """Give its threads this process's own priority, where they were started with less. Those that they make
        meanwhile have that of their makers: it is looked until there is none of the old."""
        wanted = os.getpriority(os.PRIO_PROCESS, 0)
        for _ in range(_LOOKS):
            threads = [thread for process in self.processes(sandbox_id) for thread in _threads(process)]
            behind = [thread for thread in threads if _priority(thread, known=wanted) != wanted]
            for thread in behind:
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread, wanted)
            if not behind:
                return

    def halt(self, sandbox_id: str) -> None:
        """All processes of the sandbox stand still, whatever they do."""
        self._set_frozen(sandbox_id, frozen=True)

    def proceed(self, sandbox_id: str) -> None:
        """They go on. Not halted, or gone, is fine."""
        self._set_frozen(sandbox_id, frozen=False)

    def _set_frozen(self, sandbox_id: str, *, frozen: bool) -> None:
        group = self._group("freezer", sandbox_id)
        v1 = self.version == 1
        path, word = (group / "freezer.state", ("THAWED", "FROZEN")) if v1 else (group / "cgroup.freeze", ("0", "1"))
        try:
            path.write_text(word[frozen])
        except FileNotFoundError:
            return

    def kill(self, sandbox_id: str) -> None:
        """SIGKILL all processes of the sandbox, until none is left or the time is up."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline and self._kill_members(sandbox_id):
            time.sleep(_STEP_S)

    def _kill_members(self, sandbox_id: str) -> bool:
        """One round; False when there was none left."""
        for group in self._groups(sandbox_id):
            try:
                (group / "cgroup.kill").write_text("1")
            except OSError:
                pass  # v1, or gone
        processes = self.processes(sandbox_id)
        for pid in processes:
            try:
                # The number was read in this moment from a group that only this sandbox's processes are in.
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return bool(processes)

    def remove(self, sandbox_id: str) -> None:
        """Remove the sandbox's groups, which must be empty; a process on its way out gets some time.

        A start that nobody waits for any more may put another process in meanwhile: that is killed too.
        """
        deadline = time.monotonic() + _END_S
        for group in self._groups(sandbox_id):
            while True:
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError as problem:
                    if problem.errno != errno.EBUSY or time.monotonic() > deadline:
                        raise
                    self._kill_members(sandbox_id)
                    time.sleep(_STEP_S)

    def remove_parent(self) -> None:
        """Remove the instance's own groups; with a sandbox left they stay."""
        for hierarchy in self._hierarchies():
            try:
                (hierarchy / self._parent).rmdir()
            except OSError:
                continue

    def _hierarchies(self) -> list[Path]:
        if self.version == 2:
            return [self._root]
        # Joined controllers (cpu,cpuacct) have links beside them: each hierarchy once.
        return [entry for entry in sorted(self._root.iterdir()) if entry.is_dir() and not entry.is_symlink()]

    def _groups(self, sandbox_id: str) -> list[Path]:
        groups = [hierarchy / self._parent / sandbox_id for hierarchy in self._hierarchies()]
        return [group for group in groups if group.is_dir()]

    def _group(self, controller: str, sandbox_id: str) -> Path:
        base = self._root if self.version == 2 else self._root / controller
        return base / self._parent / sandbox_id

    def _fill_cpuset(self, group: Path) -> None:
        """A v1 cpuset group starts empty and takes no process until it has CPUs and memory nodes."""
        for name in ("cpuset.cpus", "cpuset.mems"):
            if self.version == 1 and (group / name).exists() and not (group / name).read_text().strip():
                (group / name).write_text((group.parent / name).read_text())


class MemoryGauge:
    """Memory of a sandbox that cannot be given back: all but the page cache of files.

    A sandbox that writes much fills its group with page cache, which the kernel takes back by itself; guest memory is
    shmem (the sentry's memfd) and counts.
    """

    def __init__(self, group: Path, *, names: _Names) -> None:
        self._names = names
        self._opened: list[int] = []
        try:
            for name in (names.memory, "memory.stat", names.memory_events):
                self._opened.append(move_up(os.open(group / name, os.O_RDONLY | os.O_CLOEXEC)))
        except OSError:
            self.close()
            raise
        self._usage, self._stat, self._events = self._opened

    def read(self, *, above: int = 0) -> int:
        """Bytes in use. Exact only when over `above`: below it the cheap upper bound is good enough."""
        usage = int(os.pread(self._usage, 32, 0))
        if usage <= above:
            return usage
        text = os.pread(self._stat, 65536, 0)
        cache = _value(text, self._names.cache_key) - _value(text, self._names.shmem_key)
        return max(0, usage - cache)

    def host_kills(self) -> int:
        """How often the host's kernel has killed a process of the group, which was at its limit."""
        return _value(os.pread(self._events, 4096, 0), b"oom_kill ")

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.pop())


def _threads(process: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{process}/task")]
    except FileNotFoundError:
        return []


def _priority(thread: int, *, known: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:
        return known


def _value(text: bytes, key: bytes) -> int:
    """The number after `key` at the start of a line; 0 without it."""
    for line in text.split(b"\n"):
        if line.startswith(key):
            return int(line[len(key) :])
    return 0
