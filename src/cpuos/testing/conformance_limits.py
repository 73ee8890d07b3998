"""What every runtime must do at the limits of a sandbox, asked through the public SDK: as `cpuos.testing.conformance`.

Each test goes over a limit as a program would by mistake, or as an attacker would as root. The command is told which
limit it was, the sandbox goes on, and so does its neighbour. Only for runtimes that isolate: what is let loose here
would fill the machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from cpuos import Client, Result, Sandbox
from cpuos.types.sandbox import SandboxState

__all__ = ["LimitsConformance"]

HOG = "x = []\nwhile True: x.append(bytearray(8 << 20)); x[-1][::4096] = b'x' * 2048"
BOMB = "b() { b | b & b; }; b"
MANY_FILES = "x = []\nwhile True: x.append(open('/dev/null'))"
MANY_THREADS = (
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(30,), daemon=True).start()"
)
MANY_PROCESSES = "import os, time\nfor _ in range(1000):\n    if os.fork() == 0: time.sleep(20); os._exit(0)"
DISK_MIB = 64
PROCESSES = 100


class LimitsConformance:
    """The suite. One sandbox serves all tests of the class; tests that end it make their own."""

    create_options: ClassVar[dict[str, Any]] = {
        "memory": "512MiB",
        "disk": f"{DISK_MIB}MiB",
        "max_processes": PROCESSES,
        "timeout": "20m",
    }
    known_failures: ClassVar[dict[str, str]] = {}
    limit_s: ClassVar[float] = 60
    """For a program to fill what there is."""
    seen_by: ClassVar[str] = "host"
    """Who knows what is used up of memory and disks: with a kernel of its own, the guest."""

    @pytest.fixture(autouse=True)
    def _known_failure(self, request: pytest.FixtureRequest) -> None:
        reason = self.known_failures.get(request.node.originalname)
        if reason:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.fixture(scope="class")
    @classmethod
    def sandbox(cls, client: Client) -> Iterator[Sandbox]:
        with Sandbox.create(client=client, **cls.create_options) as sandbox:
            yield sandbox

    @pytest.fixture(scope="class")
    @classmethod
    def neighbour(cls, client: Client) -> Iterator[Sandbox]:
        with Sandbox.create(client=client, memory="256MiB", disk="64MiB", timeout="20m") as sandbox:
            yield sandbox

    # what is told

    @pytest.mark.parametrize("user", ["user", "root"])
    def test_memory(self, sandbox: Sandbox, user: str) -> None:
        result = sandbox.exec(["python3", "-c", HOG], user=user, timeout=self.limit_s)
        assert result.status == "oom_killed", result
        _expect(result, seen_by=self.seen_by, limit="memory", value=512 << 20)
        _goes_on(sandbox)

    def test_memory_of_a_program_below_a_shell(self, sandbox: Sandbox) -> None:
        sandbox.files.write("hog.py", HOG)
        result = sandbox.exec("echo before; python3 hog.py; echo after $?", timeout=self.limit_s)
        assert result.stdout == "before\nafter 137\n"
        _expect(result, seen_by=self.seen_by, limit="memory", value=512 << 20)

    @pytest.mark.parametrize("path", ["/workspace", "/"])
    def test_disk(self, sandbox: Sandbox, path: str) -> None:
        file = f"{path.rstrip('/')}/big"
        try:
            result = sandbox.exec(f"dd if=/dev/zero of={file} bs=1M count=500", user="root", timeout=self.limit_s)
            assert result.exit_code == 1
            _expect(result, seen_by=self.seen_by, limit="disk", value=DISK_MIB << 20, path=path)
            _goes_on(sandbox)
        finally:
            sandbox.exec(f"rm -f {file}", user="root", check=True)
        assert sandbox.exec(f"echo x > {file}; rm {file}", user="root").limit_reached is None

    def test_inodes(self, sandbox: Sandbox) -> None:
        try:
            result = sandbox.exec("mkdir many; cd many; for n in $(seq 100000); do : > $n || exit 1; done", timeout=120)
            _expect(result, seen_by=self.seen_by, limit="inodes", path="/workspace")
        finally:
            sandbox.exec("rm -rf /workspace/many", timeout=120, check=True)

    def test_files_in_memory(self, sandbox: Sandbox) -> None:
        """They are freed by nobody's end, so they have a limit well below the memory's."""
        for folder in ("/tmp", "/dev/shm"):
            result = sandbox.exec(f"dd if=/dev/zero of={folder}/big bs=1M count=500", timeout=60)
            sandbox.exec(f"rm -f {folder}/big", check=True)
            _expect(result, limit="tmp", value=128 << 20, seen_by="output")

    @pytest.mark.parametrize("user", ["user", "root"])
    @pytest.mark.parametrize("program", [MANY_PROCESSES, MANY_THREADS], ids=["processes", "threads"])
    def test_processes(self, client: Client, user: str, program: str) -> None:
        """With memory for all of them: else that is what runs out first."""
        with Sandbox.create(client=client, **(self.create_options | {"memory": "2GiB"})) as sandbox:
            result = sandbox.exec(["python3", "-c", program], user=user, timeout=60)
            assert result.exit_code == 1, result
            assert result.limit_reached is not None
            assert (result.limit_reached.limit, result.limit_reached.value) == ("processes", PROCESSES)
            assert "max_processes" in result.reason
            _goes_on(sandbox)

    def test_open_files(self, sandbox: Sandbox) -> None:
        result = sandbox.exec(["python3", "-c", MANY_FILES], timeout=120)
        _expect(result, limit="open_files", value=1 << 16, seen_by="output")
        assert sandbox.exec("ulimit -n", check=True).stdout == "65536\n"

    def test_time_of_a_command(self, sandbox: Sandbox) -> None:
        result = sandbox.exec("sleep 60", timeout=0.5)
        assert result.status == "timed_out"
        _expect(result, limit="timeout", value=0.5)

    def test_session(self, client: Client) -> None:
        sandbox = Sandbox.create(client=client, **(self.create_options | {"timeout": "4s"}))
        try:
            result = sandbox.spawn("sleep 600").wait(timeout=60)
            assert result.status == "killed"
            _expect(result, limit="session", value=4)
        finally:
            sandbox.kill()
        assert (sandbox.state, "time" in sandbox.info.reason) == (SandboxState.STOPPED, True)

    def test_an_ordinary_failure_met_none(self, sandbox: Sandbox) -> None:
        for command in ("false", "ls /nowhere", "kill -SEGV $$"):
            result = sandbox.exec(command)
            assert (result.limit_reached, result.reason) == (None, "")

    def test_each_is_in_the_audit_log(self, client: Client, sandbox: Sandbox) -> None:
        result = sandbox.exec("sleep 60", timeout=0.2)
        deadline = time.monotonic() + 30
        while True:  # the server reads the gateway's journal each second
            entries = client.audit(sandbox=sandbox.id, action="limit.reached", limit=1000).entries
            told = [entry for entry in entries if entry.detail["command"] == result.command_id]
            if told or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        (entry,) = told
        assert (entry.actor, entry.detail["limit"], entry.detail["value"]) == ("system", "timeout", 0.2)

    # what the guest sees

    @pytest.mark.parametrize("cpu", [1, 2])
    def test_cpus(self, client: Client, cpu: int) -> None:
        seen = min(cpu, len(os.sched_getaffinity(0)))
        ask = "nproc; python3 -c 'import os; print(os.cpu_count())'; grep -c ^processor /proc/cpuinfo"
        with Sandbox.create(client=client, **(self.create_options | {"cpu": cpu})) as sandbox:
            assert sandbox.exec(ask, check=True).stdout.split() == [str(seen)] * 3

    def test_memory_and_disk(self, sandbox: Sandbox) -> None:
        total = int(sandbox.exec("awk '/MemTotal/ {print $2}' /proc/meminfo", check=True).stdout)
        assert 500 << 10 <= total <= 520 << 10
        for path in ("/workspace", "/"):
            size = int(sandbox.exec(f"df -m --output=size {path} | tail -1", check=True).stdout)
            assert DISK_MIB <= size <= DISK_MIB * 1.06

    # who else goes on

    @pytest.mark.parametrize("program", [["bash", "-c", BOMB], ["python3", "-c", HOG]], ids=["bomb", "hog"])
    def test_a_neighbour_keeps_its_latency(self, client: Client, neighbour: Sandbox, program: list[str]) -> None:
        """Pairs of a neighbour's execs with and without it, side by side in time: a busy machine slows down both."""
        calm, disturbed = [], []
        with Sandbox.create(client=client, memory="256MiB", disk="64MiB", timeout="10m") as bombed:
            for _ in range(4):
                calm += _latencies(neighbour)
                job = bombed.spawn(program, user="root", timeout=60)
                time.sleep(0.3)
                disturbed += _latencies(neighbour)
                job.kill()
                assert job.wait(timeout=60).status in {"killed", "timed_out", "exited", "oom_killed"}
            _goes_on(bombed)
        assert _p95(disturbed) < max(20 * _p95(calm), 2.0), (calm, disturbed)


def _expect(
    result: Result, *, limit: str, value: float | None = None, path: str | None = None, seen_by: str = "host"
) -> None:
    reached = result.limit_reached
    assert reached is not None, result
    assert (reached.limit, reached.path, reached.seen_by) == (limit, path, seen_by), result
    assert value is None or reached.value == value, result
    assert reached.reason.endswith("."), result


def _goes_on(sandbox: Sandbox) -> None:
    for _ in range(3):
        assert sandbox.exec("echo alive", timeout=60).stdout == "alive\n"


def _latencies(sandbox: Sandbox) -> list[float]:
    times = []
    for _ in range(10):
        started = time.monotonic()
        sandbox.exec("true", check=True, timeout=60)
        times.append(time.monotonic() - started)
    return times


def _p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20)[-1]
