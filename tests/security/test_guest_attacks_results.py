"""A guest that attacks its agent, its limits or its host's answers: results stay true, and others do not notice."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from cpuos import Client, Sandbox
from cpuos.errors import CpuosError, SandboxGone

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def sandbox(client: Client):
    with Sandbox.create(client=client, memory="512MiB", disk="256MiB", timeout="20m") as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def neighbour(client: Client):
    with Sandbox.create(client=client, memory="256MiB", disk="64MiB", timeout="20m") as sandbox:
        yield sandbox


def python(sandbox: Sandbox, program: str, **options):
    return sandbox.exec(["python3", "-c", program], user="root", timeout=60, **options)


def test_programs_open_their_streams_anew(sandbox: Sandbox) -> None:
    data = os.urandom(300_000)
    result = sandbox.exec("tee /dev/stderr", stdin=data, timeout=60)
    assert (result.stdout_raw, result.stderr_raw) == (data, data)


def test_both_streams_come_whole_in_odd_pieces(sandbox: Sandbox) -> None:
    program = """
import os, random
dice, sent = random.Random(5), [b"", b""]
for _ in range(400):
    which, data = dice.randrange(2), dice.randbytes(dice.choice([0, 1, 2, 4095, 4096, 4097, 65535, 65536, 65537]))
    sent[which] += data
    view = memoryview(data)
    os.write(which + 1, b"")
    while view:
        view = view[os.write(which + 1, view):]
for name, data in zip(("out", "err"), sent):
    open("/tmp/" + name, "wb").write(data)
"""
    result = python(sandbox, program, max_output="64MiB")
    assert result.stdout_raw == sandbox.files.read("/tmp/out")
    assert result.stderr_raw == sandbox.files.read("/tmp/err")


def test_a_deep_tree_is_never_copied_in_part(sandbox: Sandbox, tmp_path: Path) -> None:
    program = """
import os
for _ in range(60):
    os.mkdir("7" * 100); os.chdir("7" * 100)
open("leaf", "w").close()
"""
    sandbox.exec(["python3", "-c", program], check=True)
    top = "7" * 100
    with pytest.raises(CpuosError):
        sandbox.files.download(f"/workspace/{top}", tmp_path / "deep")
    with pytest.raises(CpuosError):
        sandbox.files.move(top, "/tmp/moved")
    assert sandbox.exec("find . -name leaf | wc -l", check=True).stdout == "1\n"
    assert not sandbox.files.exists("/tmp/moved")
    sandbox.files.remove(top, recursive=True)


def test_a_folder_that_tells_only_names_is_never_copied_in_part(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.exec("mkdir -p names/in; echo x > names/in/f; chmod 444 names/in", check=True)
    for path in ("/workspace/names", "/workspace/names/in"):
        with pytest.raises(CpuosError, match="permission"):
            sandbox.files.download(path, tmp_path / "names")
        with pytest.raises(CpuosError, match="permission"):
            sandbox.files.move(path, "/tmp/names")
    sandbox.exec("chmod 755 names/in; test -e names/in/f", check=True)


def test_a_terminal_that_reads_no_keys_can_be_killed(sandbox: Sandbox) -> None:
    with sandbox.pty(["bash", "-c", "stty raw; sleep 60"]) as terminal:
        terminal.send(b"x" * 1_500_000)
        started = time.monotonic()
        terminal.kill()
        assert terminal.wait().status == "killed"
        assert time.monotonic() - started < 30


def test_connections_to_the_agent_from_inside_do_not_count(sandbox: Sandbox, neighbour: Sandbox) -> None:
    program = """
import socket, time
held = []
for _ in range(1200):
    s = socket.socket(); s.settimeout(20); s.connect(("10.0.0.2", 1)); held.append(s)
print(len(held), flush=True); time.sleep(200)
"""
    job = sandbox.spawn(["python3", "-c", program], user="root")
    deadline = time.monotonic() + 60
    while not job.output() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sandbox.exec("echo in", timeout=60).stdout == "in\n"
    assert neighbour.exec("echo beside", timeout=60).stdout == "beside\n"
    job.kill()


def test_a_guest_that_ends_itself_is_told_so(client: Client) -> None:
    with Sandbox.create(client=client, template="base", memory="256MiB", disk="64MiB") as box:
        program = "import socket\ntry: socket.socket(socket.AF_INET, socket.SOCK_RAW, 6)\nexcept OSError: pass"
        box.exec(["python3", "-c", program], user="root")
        with pytest.raises(SandboxGone):
            box.exec("kill -KILL 1; kill -SEGV 1; kill -ABRT 1; sleep 60", user="root", timeout=90)
        assert box.refresh().state == "lost"
        assert "error" not in box.info.reason


@pytest.mark.parametrize("door", ["gateway_port", "api_port"])
def test_heads_without_end_cost_nothing(instance, sandbox: Sandbox, door: str) -> None:
    port = getattr(instance.settings, door)
    part = {"gateway_port": "gateway", "api_port": "server"}[door]
    before = _resident_mib(instance.pids()[part])
    assert not _takes_a_head_of(port, 64 << 20)
    assert _resident_mib(instance.pids()[part]) - before < 16
    half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    try:
        for attacker in half_open:
            attacker.sendall(b"GET /v1/health HTTP/1.1\r\nX: ")
        assert sandbox.exec("echo on", timeout=60).stdout == "on\n"
    finally:
        for attacker in half_open:
            attacker.close()


def _takes_a_head_of(port: int, size: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as attacker:
        try:
            attacker.sendall(b"GET /v1/health HTTP/1.1\r\nX: ")
            for _ in range(size >> 20):
                attacker.sendall(b"a" * (1 << 20))
        except OSError:
            return False
        return True


def _resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024
