"""Limits of a sandbox end what goes over them, say so, and leave the sandbox usable."""

from __future__ import annotations

import time

import pytest

from cpuos import Client, Sandbox
from cpuos.errors import LimitReached

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def sandbox(client: Client):
    with Sandbox.create(client=client, memory="512MiB", disk="512MiB", max_processes=100, timeout="20m") as sandbox:
        yield sandbox


HOG = "x = []\nwhile True: x.append(bytearray(8 << 20)); x[-1][::4096] = b'x' * 2048"


@pytest.mark.parametrize("user", ["user", "root"])
def test_a_memory_hog_is_killed_and_named(sandbox: Sandbox, user: str) -> None:
    job = sandbox.spawn("for i in $(seq 1000); do echo $i; sleep 0.2; done")
    result = sandbox.exec(["python3", "-c", HOG], user=user, timeout=60)
    assert result.status == "oom_killed", result
    assert sandbox.exec("echo alive", check=True).stdout == "alive\n"
    assert job.refresh().status == "running"
    job.kill()


def test_a_memory_hog_below_a_shell_is_named_too(sandbox: Sandbox) -> None:
    sandbox.files.write("hog.py", HOG)
    result = sandbox.exec("echo before; python3 hog.py; echo after $?", timeout=60)
    assert result.stdout == "before\nafter 137\n"
    assert "memory" in result.reason or result.status == "oom_killed", result


@pytest.mark.parametrize("memory", ["256MiB", "512MiB", "1GiB"])
@pytest.mark.parametrize("user", ["user", "root"])
def test_a_fork_bomb_leaves_the_sandbox_usable(client: Client, sandbox: Sandbox, user: str, memory: str) -> None:
    with Sandbox.create(client=client, memory=memory, disk="256MiB") as bombed:
        job = bombed.spawn(["bash", "-c", "b() { b | b & b; }; b"], user=user, timeout=8)
        time.sleep(2)
        started = time.monotonic()
        assert sandbox.exec("echo neighbour", check=True).stdout == "neighbour\n"
        assert time.monotonic() - started < 20
        job.kill()
        result = job.wait(timeout=60)
        assert result.status in {"killed", "timed_out", "exited"}
        for _ in range(5):
            assert bombed.exec("echo alive", timeout=60).stdout == "alive\n"


def test_the_guest_sees_its_own_limits(client: Client) -> None:
    with Sandbox.create(client=client, cpu=1, memory="512MiB", disk="256MiB") as small:
        assert small.exec("nproc", check=True).stdout == "1\n"
        total = int(small.exec("awk '/MemTotal/ {print $2}' /proc/meminfo", check=True).stdout)
        assert 500 * 1024 <= total <= 520 * 1024


def test_the_session_ends_at_its_time(client: Client) -> None:
    sandbox = Sandbox.create(client=client, memory="256MiB", disk="64MiB", timeout="3s")
    try:
        deadline = time.monotonic() + 60
        while sandbox.refresh().state in {"running", "stopping"} and time.monotonic() < deadline:
            time.sleep(0.3)
        assert sandbox.state == "stopped"
        assert "time" in sandbox.info.reason
    finally:
        sandbox.kill()


def test_a_longer_time_can_be_given(client: Client) -> None:
    with Sandbox.create(client=client, memory="256MiB", disk="64MiB", timeout="8s") as sandbox:
        sandbox.set_timeout("10m")
        time.sleep(9)
        assert sandbox.exec("echo on", check=True).stdout == "on\n"


def test_too_many_commands_are_told_so(client: Client) -> None:
    with Sandbox.create(client=client, memory="1GiB", disk="64MiB", max_processes=512) as sandbox:
        jobs = [sandbox.spawn("sleep 600") for _ in range(64)]
        assert len({job.id for job in jobs}) == 64
        with pytest.raises(LimitReached, match="64"):
            sandbox.exec("true", timeout=30)
        jobs[0].kill()
        jobs[0].wait(timeout=60)
        assert sandbox.exec("echo room", check=True).stdout == "room\n"
