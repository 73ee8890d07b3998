"""The command line against a running instance: what scripts and people see of it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuos.testing.instance import Instance

pytestmark = pytest.mark.gvisor

CPUOS = str(Path(sys.executable).parent / "cpuos")
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def run(instance: Instance) -> Run:
    def run(*arguments: str, stdin: bytes = b"", check: bool = False, cwd: Path | None = None):
        done = subprocess.run(
            [CPUOS, *arguments], input=stdin, capture_output=True, env=instance.environment(), timeout=120, cwd=cwd
        )
        assert not check or done.returncode == 0, done.stderr.decode()
        return done

    return run


@pytest.fixture(scope="module")
def box(run: Run) -> Iterator[str]:
    name = run("create", "--timeout", "20m", check=True).stdout.decode().strip()
    yield name
    run("kill", name, check=True)


def live(run: Run) -> set[str]:
    return set(run("ls", "-q", check=True).stdout.decode().split())


def test_create_prints_the_id_alone(run: Run) -> None:
    done = run("create", "--name", "cli-one", "--label", "team=data", "--cpu", "1", "--memory", "512MiB", check=True)
    identifier = done.stdout.decode()
    assert len(identifier.strip()) == 20
    assert identifier.count("\n") == 1
    listed = json.loads(run("ls", "--json", "--label", "team=data", check=True).stdout)["sandboxes"]
    assert [(box["id"], box["name"], box["memory_mib"]) for box in listed] == [(identifier.strip(), "cli-one", 512)]
    for reference in ("cli-one", identifier.strip()[:8]):
        assert run("exec", reference, "hostname", check=True).stdout == b"cli-one\n"
    assert run("kill", "cli-one", check=True).stdout == done.stdout
    assert identifier.strip() not in live(run)
    assert json.loads(run("kill", "--json", identifier.strip(), check=True).stdout)["state"] == "stopped"


@pytest.mark.parametrize(
    ("arguments", "code", "stdout"),
    [
        (["--", "echo", "two  spaces", "$HOME"], 0, b"two  spaces $HOME\n"),
        (["echo $HOME"], 0, b"/home/user\n"),
        (["exit 3"], 3, b""),
        (["--timeout", "1s", "echo before; sleep 60"], 124, b"before\n"),
        (["--", "no-such-program"], 127, b""),
        (["no-such-program"], 127, b""),
        (["--", "/etc/passwd"], 126, b""),
        (["kill -SEGV $$"], 139, b""),
        (["-w", "/tmp", "-e", "A=1", "-u", "root", 'echo "$PWD $A $(id -un)"'], 0, b"/tmp 1 root\n"),
        (["-w", "/nope", "true"], 125, b""),
        (["-u", "nobody-here", "true"], 125, b""),
        (["-i", "wc -c"], 0, b"6\n"),
        (["cat"], 0, b""),
        (["printf '\\377\\000\\033[31m'"], 0, b"\xff\x00\x1b[31m"),
    ],
)
def test_exec_exits_as_the_command_did(run: Run, box: str, arguments: list[str], code: int, stdout: bytes) -> None:
    options = [word for word in arguments if word != arguments[-1]]
    done = run("exec", *arguments[:0], box, *options, arguments[-1], stdin=b"hello\n")
    assert done.stdout == stdout
    assert done.returncode == code, done.stderr.decode()


def test_exec_keeps_streams_apart(run: Run, box: str) -> None:
    done = run("exec", box, "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


def test_exec_as_json(run: Run, box: str) -> None:
    done = run("exec", "--json", box, "echo out; exit 4")
    result = json.loads(done.stdout)
    assert (done.returncode, result["status"], result["exit_code"], result["stdout"]) == (4, "exited", 4, "out\n")
    failed = run("exec", "--json", "no-such-box", "true")
    assert failed.returncode == 125
    assert json.loads(failed.stdout)["error"]["code"] == "sandbox_not_found"
    assert len(failed.stderr.decode().splitlines()) == 3


def test_exec_streams_all_bytes_of_a_large_output(run: Run, box: str) -> None:
    done = run("exec", box, "head -c 20000000 /dev/zero | tr '\\0' x; echo END", check=True)
    assert len(done.stdout) == 20_000_004
    assert done.stdout.endswith(b"xEND\n")


def test_exec_input_of_a_megabyte(run: Run, box: str) -> None:
    data = os.urandom(1 << 20)
    assert run("exec", "-i", box, "cat", stdin=data, check=True).stdout == data


def test_reader_that_leaves_ends_the_command(run: Run, box: str, instance: Instance) -> None:
    line = f"{CPUOS} exec {box} 'while true; do echo line; sleep 0.01; done' | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, env=instance.environment(), timeout=120)
    assert done.stdout == b"line\n"
    assert done.stderr == b""
    assert json.loads(run("ps", "--json", box).stdout)["commands"] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_command(run: Run, box: str, instance: Instance, number: int) -> None:
    process = subprocess.Popen(
        [CPUOS, "exec", box, "echo started; sleep 300"], stdout=subprocess.PIPE, env=instance.environment()
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        process.send_signal(number)
        assert process.wait(60) == 130
    assert json.loads(run("ps", "--json", box).stdout)["commands"] == []


@pytest.mark.parametrize("delay_s", [0.3, 0.6, 1.0, 2.0])
def test_interrupt_leaves_no_throw_away_sandbox(run: Run, instance: Instance, delay_s: float) -> None:
    before = live(run)
    process = subprocess.Popen(
        [CPUOS, "exec", "--template", "python", "--", "sleep", "300"],
        env=instance.environment(),
        stderr=subprocess.PIPE,
    )
    with process:
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert live(run) == before


def test_a_throw_away_sandbox_goes_with_its_command(run: Run) -> None:
    before = live(run)
    assert run("exec", "--template", "base", "--", "echo", "hi", check=True).stdout == b"hi\n"
    assert live(run) == before


def test_ps_logs_kill(run: Run, box: str, instance: Instance) -> None:
    with subprocess.Popen(
        [CPUOS, "exec", box, "echo here; echo there >&2; sleep 300"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=instance.environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        (command,) = json.loads(run("ps", "--json", box, check=True).stdout)["commands"]
        assert command["status"] == "running"
        assert run("kill", box, command["id"][:6], check=True).stdout.decode().strip() == command["id"]
        assert process.wait(60) == 137
    logs = run("logs", box, command["id"], check=True)
    assert (logs.stdout, logs.stderr) == (b"here\n", b"there\n")
    assert run("logs", box, "zzzz").returncode == 1
    shown = run("ps", "--all", box, check=True).stdout.decode()
    assert "killed" in shown


NAMES = ["🤣.txt", "报告 1.pdf", "a\"b'.txt", "-rf", "new\nline", "e\u0301", "é", "x" * 255, "%2e%2e", "a;b?c#d", "a:b"]


def test_cp_takes_any_name(run: Run, box: str, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text(name)
        run("cp", "--", f"./{name}", f"{box}:names/{name}", check=True, cwd=tmp_path)
        run("cp", "--", f"{box}:names/{name}", "back", check=True, cwd=tmp_path)
        assert (tmp_path / "back").read_text() == name
        assert run("cp", f"{box}:names/{name}", "-", check=True).stdout == name.encode()


@pytest.mark.parametrize("size", [0, 1, 4095, 65536, 5_000_000])
def test_cp_takes_any_bytes(run: Run, box: str, tmp_path: Path, size: int) -> None:
    (tmp_path / "in").write_bytes(data := os.urandom(size))
    run("cp", "in", f"{box}:bytes", check=True, cwd=tmp_path)
    run("cp", f"{box}:bytes", "out", check=True, cwd=tmp_path)
    assert (tmp_path / "out").read_bytes() == data
    run("cp", "-", f"{box}:piped", stdin=data, check=True)
    assert run("cp", f"{box}:piped", "-", check=True).stdout == data


def test_cp_of_folders(run: Run, box: str, tmp_path: Path) -> None:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "file").write_text("x")
    run("cp", "tree", f"{box}:", check=True, cwd=tmp_path)
    run("cp", "tree", f"{box}:as-another", check=True, cwd=tmp_path)
    run("cp", "tree/.", f"{box}:flat", check=True, cwd=tmp_path)
    found = run("exec", box, "find tree as-another flat -type f | sort", check=True).stdout.decode().split()
    assert found == ["as-another/sub/file", "flat/sub/file", "tree/sub/file"]
    run("exec", box, "mkdir -p made/inner; echo y > made/inner/y; ln -s /etc/passwd made/link", check=True)
    (tmp_path / "into").mkdir()
    told = run("cp", f"{box}:made", "into", check=True, cwd=tmp_path)
    run("cp", f"{box}:made/.", "contents", check=True, cwd=tmp_path)
    assert (tmp_path / "into" / "made" / "inner" / "y").read_text() == "y\n"
    assert (tmp_path / "contents" / "inner" / "y").read_text() == "y\n"
    assert not (tmp_path / "into" / "made" / "link").exists()
    assert b"left out: " in told.stderr


def test_cp_says_what_is_wrong(run: Run, box: str, tmp_path: Path) -> None:
    for arguments, code in [
        (("nothing-here", f"{box}:"), "invalid_request"),
        ((f"{box}:nothing-here", "x"), "file_not_found"),
        (("a", "b"), "invalid_request"),
        ((f"{box}:a", f"{box}:b"), "invalid_request"),
        ((f"{box}:/root/x", "x"), "file_permission_denied"),
    ]:
        done = run("cp", "--json", *arguments, cwd=tmp_path)
        assert done.returncode == (2 if code == "invalid_request" else 1)
        assert json.loads(done.stdout)["error"]["code"] == code
    assert list(tmp_path.iterdir()) == []


def test_audit_tells_who_did_what(run: Run, box: str) -> None:
    run("exec", box, "true", check=True)
    entries = json.loads(run("audit", "--sandbox", box, "--limit", "50", "--json", check=True).stdout)["entries"]
    phases = [entry["phase"] for entry in entries if entry["action"] == "command.start"]
    assert "intent" in phases
    assert "outcome" in phases
    assert "command.start" in run("audit", "--sandbox", box, check=True).stdout.decode()


def test_hostile_names_do_not_reach_the_terminal(run: Run, box: str) -> None:
    run("exec", box, "--", "sh", "-c", "true", "\x1b]0;owned\x07", check=True)
    shown = run("ps", "--all", box, check=True).stdout
    assert b"\x1b" not in shown
    assert b"\\x1b]0;owned\\x07" in shown


def test_overview_and_lists(run: Run, box: str) -> None:
    assert b"cpuOS is running" in run(check=True).stdout
    assert b"python" in run("template", "ls", check=True).stdout
    assert box.encode() in run("ls", check=True).stdout


# What a terminal sees


def drive(arguments: list[str], environment: dict[str, str], steps: list[tuple[bytes, bytes]]) -> tuple[bytes, int]:
    """Run a command on a terminal; each step waits for a text and types an answer."""
    process, ours = pty.fork()
    if process == 0:
        os.execve(CPUOS, [CPUOS, *arguments], environment)
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 132, 0, 0))
    seen, mark, deadline = b"", 0, time.monotonic() + 60
    todo = list(steps)
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                data = os.read(ours, 65536)
            except OSError:
                break
            if not data:
                break
            seen += data
        if todo and todo[0][0] in seen[mark:]:
            mark = len(seen)
            os.write(ours, todo.pop(0)[1])
    else:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    os.close(ours)
    return seen, os.waitstatus_to_exitcode(status)


def test_shell_is_a_terminal(box: str, instance: Instance) -> None:
    steps = [(b"$ ", b"stty size; tty; echo DO''NE\n"), (b"DONE", b"exit 7\n")]
    seen, code = drive(["shell", box], instance.environment(), steps)
    assert b"40 132" in seen
    assert b"/dev/pts/" in seen
    assert code == 7


def test_shell_passes_control_c_on(box: str, instance: Instance) -> None:
    program = "import signal, time; signal.signal(2, signal.SIG_DFL); print('G' + 'O', flush=True); time.sleep(300)"
    steps = [(b"$ ", f'exec python3 -c "{program}"\n'.encode()), (b"GO\r\n", b"\x03")]
    _, code = drive(["shell", box], instance.environment(), steps)
    assert code == 130


def test_shell_drops_what_drives_the_terminal(box: str, instance: Instance) -> None:
    steps = [(b"$ ", b"printf 'A\\033]0;own''ed\\007B\\033]52;c;eA==\\007C\\033[21tD\\n'; exit\n")]
    seen, _ = drive(["shell", box], instance.environment(), steps)
    assert b"ABCD" in seen
    assert b"\x1b]" not in seen


def test_output_on_a_terminal_is_made_safe(box: str, instance: Instance) -> None:
    command = "printf '\\033[31mred\\033[0m \\033]0;owned\\007 \\033[2Jgone\\n'"
    seen, code = drive(["exec", box, command], instance.environment(), [])
    assert code == 0
    assert b"\x1b[31mred\x1b[0m" in seen
    assert b"\\x1b]0;owned\\x07" in seen
    assert b"\\x1b[2Jgone" in seen


def test_exec_with_a_terminal(box: str, instance: Instance) -> None:
    seen, code = drive(
        ["exec", "-t", box, "--", "sh", "-c", "test -t 0 && echo TTY; exit 6"], instance.environment(), []
    )
    assert b"TTY" in seen
    assert code == 6
