"""Failures that people report of sandbox products, as checks on real sandboxes: commands (C01, C04–C07)."""

from __future__ import annotations

import hashlib
import os
import time

import pytest

from cpuos import Client, Sandbox
from cpuos.testing.memory import resident_mib

pytestmark = pytest.mark.gvisor


@pytest.fixture(scope="module")
def sandbox(client: Client):
    with Sandbox.create(client=client, memory="2GiB", disk="4GiB", timeout="20m") as sandbox:
        yield sandbox


# C01: a timeout ends the command and its children; nothing remains, no zombies.


@pytest.mark.parametrize(
    "command",
    [
        "sh -c 'sleep 300 & sleep 300'",
        "(setsid sleep 300 </dev/null >/dev/null 2>&1 &) ; sleep 300",
        "setsid sh -c 'setsid sleep 300 & setsid sleep 300' & nohup sleep 300 & sleep 300",
        "trap '' TERM INT HUP; sleep 300 & sleep 300",
        "python3 -c 'import os,time\nfor _ in range(50):\n  os.fork() or time.sleep(300)\ntime.sleep(300)'",
    ],
    ids=["child", "daemon", "sessions", "traps", "fork-tree"],
)
def test_c01_timeout_ends_the_whole_tree(sandbox: Sandbox, command: str) -> None:
    started = time.monotonic()
    result = sandbox.exec(command, timeout=1)
    elapsed = time.monotonic() - started
    assert result.status == "timed_out"
    assert elapsed < 30
    left = sandbox.exec(["pgrep", "-fc", "(sleep|import os,time.*) ?300"], user="root").stdout
    assert left == "0\n"


def test_c01_no_zombies_after_orphan_makers(sandbox: Sandbox) -> None:
    sandbox.exec("for i in $(seq 300); do sh -c 'sleep 0.01 &' ; done; sleep 1", timeout=60, check=True)
    assert sandbox.exec("ps -eo stat= | grep -c ^Z", user="root").stdout == "0\n"


# C04: the kept session stays usable or says that it restarted.

NASTY = [
    "cat <<EOF\nsome 'text\nEOF",
    "cat <<'NEVER'\nno end",
    "echo 'unbalanced",
    'echo "unbalanced $(',
    "exit 3",
    "set -e; false",
    "set -u; echo $unset_variable",
    "exec bash",
    "exec sleep 0.1",
    "exec >/dev/null 2>&1",
    "exec 1>&-",
    "kill -9 $$",
    "trap 'exit 5' EXIT",
    "readonly PATH",
    "cd /tmp && mkdir gone && cd gone && rmdir ../gone",
    "unset PATH",
    "alias echo=false",
    "echo() { false; }",
    "IFS=o",
    "set -n",
    "set -x",
    "shopt -s failglob; ls *.none",
    "while true; do sleep 1; done",
    "sleep 100 & disown; echo started",
    "export BASH_ENV=/nonexistent PROMPT_COMMAND=false",
    "eval 'if true; then'",
    "return 4",
    "stty raw 2>/dev/null; cat",
    "}",
    "printf '\\033[2J\\0'",
]


@pytest.mark.parametrize("nasty", NASTY)
def test_c04_kept_shell_survives(sandbox: Sandbox, nasty: str) -> None:
    shell = sandbox.shell()
    shell.run("export KEPT=yes")
    first = shell.run(nasty, timeout=3)
    assert first.status in {"exited", "timed_out", "signalled"}
    after = shell.run("command printf 'ok %s\\n' \"$KEPT\"", timeout=10)
    assert after.stdout.endswith("ok yes\n") or after.shell_restarted, (first, after)


def test_c04_interrupting_a_run_keeps_the_shell(sandbox: Sandbox) -> None:
    shell = sandbox.shell()
    shell.run("cd /tmp; X=before")
    assert shell.run("X=during; sleep 100", timeout=1).status == "timed_out"
    assert shell.run("echo $X $PWD").stdout == "before /tmp\n"


# C05: readers of stdin see its end.


@pytest.mark.parametrize(
    "command",
    ["cat", "python3 -c 'input()'", "grep x", "read v", "wc -c", "sort", "bash", "ssh-keygen -y -f /dev/stdin"],
)
def test_c05_stdin_is_at_its_end(sandbox: Sandbox, command: str) -> None:
    assert sandbox.exec(command, timeout=30).status == "exited"


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"no newline", bytes(range(256)) * 16, os.urandom(1 << 20)], ids=len)
def test_c05_stdin_bytes_are_exact(sandbox: Sandbox, data: bytes) -> None:
    result = sandbox.exec(["sha256sum"], stdin=data, timeout=60)
    assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()


def test_c05_a_program_that_does_not_read_its_stdin(sandbox: Sandbox) -> None:
    assert sandbox.exec("exit 2", stdin=b"x" * (4 << 20), timeout=60).exit_code == 2


# C06: large and odd output.

BIG = 200_000_000


def test_c06_large_output_is_bounded_and_kept(sandbox: Sandbox, instance) -> None:
    before = {name: resident_mib(pid) for name, pid in instance.pids().items()}
    result = sandbox.exec(f"head -c {BIG} /dev/zero | tr '\\0' A; echo END", timeout=120)
    assert (result.status, result.exit_code, result.truncated) == ("exited", 0, True)
    assert result.stdout.startswith("A" * 1000)
    assert result.stdout.endswith("AEND\n")
    assert result.stdout_bytes == BIG + 4
    assert result.stdout_dropped_bytes == BIG + 4 - len(result.stdout_raw)
    growth = {name: resident_mib(pid) - before[name] for name, pid in instance.pids().items()}
    assert max(growth.values()) < 64, growth
    # The whole of it lies in a file inside, for the agent's own tools …
    inside = sandbox.exec(f"wc -c < {result.output_path}/stdout; tail -c 4 {result.output_path}/stdout", check=True)
    assert inside.stdout.split() == [str(BIG + 4), "END"]
    # … and on the node, for everybody else.
    digest, size = hashlib.sha256(), 0
    job = sandbox.commands.get(result.command_id)
    while chunk := job.output(offset=size, limit=8 << 20):
        digest.update(chunk)
        size += len(chunk)
    assert size == BIG + 4
    expected = hashlib.sha256()
    for _ in range(200):
        expected.update(b"A" * (BIG // 200))
    expected.update(b"END\n")
    assert digest.digest() == expected.digest()


def test_c06_callback_gets_all_of_it(sandbox: Sandbox) -> None:
    size = 0

    def count(line: str) -> None:
        nonlocal size
        size += len(line) + 1

    sandbox.exec(f"yes {'y' * 999} | head -c {BIG}", on_stdout=count, timeout=120, check=True)
    assert size == BIG


def test_c06_multi_byte_characters_are_not_broken(sandbox: Sandbox) -> None:
    text = "é🤣報" * 70_000
    result = sandbox.exec("cat", stdin=text.encode(), timeout=60, max_output="4MiB")
    assert result.stdout == text
    lines: list[str] = []
    sandbox.exec("fold -b -w 100000 | cat", stdin=text.encode(), on_stdout=lines.append, timeout=60)
    streamed = sandbox.exec(
        "python3 -c \"import sys,time\nfor b in 'é🤣報\\\\n'.encode():\n"
        ' sys.stdout.buffer.write(bytes([b])); sys.stdout.flush(); time.sleep(0.01)"',
        on_stdout=lines.append,
    )
    assert lines[-1] == "é🤣報"
    assert streamed.stdout == "é🤣報\n"


def test_c06_stderr_is_not_eaten_by_stdout(sandbox: Sandbox) -> None:
    result = sandbox.exec("head -c 30000000 /dev/zero; echo small >&2", timeout=60)
    assert result.stderr == "small\n"
    assert result.stderr_dropped_bytes == 0


def test_c06_the_same_with_a_pty(sandbox: Sandbox) -> None:
    with sandbox.pty(["bash", "-c", "test -t 1 && seq 1 200000"]) as terminal:
        seen = b"".join(terminal)
        result = terminal.wait()
    assert (result.status, result.exit_code) == ("exited", 0)
    assert seen == b"".join(b"%d\r\n" % number for number in range(1, 200_001))
    assert result.stdout.startswith("1\r\n2\r\n")
    assert result.stdout.endswith("200000\r\n")


# C07: output before the timeout is returned.


@pytest.mark.parametrize("run", ["exec", "shell", "job", "callback"])
def test_c07_output_before_the_timeout(sandbox: Sandbox, run: str) -> None:
    command = f"for i in 1 2 3; do echo $i; sleep 0.5; done; touch said-{run}; sleep 100"
    lines: list[str] = []
    limit_s = 3
    while not sandbox.exec(["test", "-e", f"said-{run}"]).ok:  # a machine that stands still gives it too little time
        lines.clear()
        if run == "exec":
            result = sandbox.exec(command, timeout=limit_s)
        elif run == "shell":
            result = sandbox.shell().run(command, timeout=limit_s)
        elif run == "job":
            result = sandbox.spawn(command, timeout=limit_s).wait()
        else:
            result = sandbox.exec(command, timeout=limit_s, on_stdout=lines.append)
        assert result.status == "timed_out"
        limit_s *= 3
    assert result.stdout == "1\n2\n3\n"
    assert lines == (["1", "2", "3"] if run == "callback" else [])
