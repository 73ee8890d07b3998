"""What every runtime must do, asked through the public SDK.

A test module subclasses `SandboxConformance` and gives one fixture, `client`: a `cpuos.Client` of an instance whose
default runtime is the one under test. Known differences of a runtime are listed in `known_failures` with the reason,
so that a list which only shrinks says how far a runtime is. `scale` multiplies sizes and counts: 1 in the fast lane.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cpuos import Client, Sandbox
from cpuos.errors import (
    AuthenticationError,
    CommandFailed,
    Conflict,
    CpuosError,
    FileConflict,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    SandboxGone,
)

__all__ = ["ODD_NAMES", "SandboxConformance"]

ODD_NAMES = [
    "🤣.txt",
    "报告 1.pdf",
    "a\"b'.txt",
    "-rf",
    "new\nline",
    "\u00e9-nfc",
    "e\u0301-nfd",
    "x" * 255,
    "%2e%2e",
    "a;b?c#d",
    " lead and trail ",
    "back\\slash",
    "tab\there",
    "&amp=1+2",
    "...",
]


class SandboxConformance:
    """The suite. One sandbox serves all tests of the class; tests that end it make their own."""

    scale: ClassVar[int] = 1
    known_failures: ClassVar[dict[str, str]] = {}
    create_options: ClassVar[dict[str, Any]] = {"memory": "1GiB", "disk": "2GiB", "timeout": "10m"}

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

    # exec: results

    def test_exit_code_and_streams_are_apart(self, sandbox: Sandbox) -> None:
        result = sandbox.exec("echo out; echo err >&2; exit 7")
        assert (result.status, result.exit_code, result.stdout, result.stderr) == ("exited", 7, "out\n", "err\n")
        assert result.duration_s > 0
        assert not result.ok

    def test_argv_arrives_as_it_is(self, sandbox: Sandbox) -> None:
        words = ["a b", "", "$HOME", "'", '"', "new\nline", "*", "报告"]
        result = sandbox.exec(["printf", "[%s]", *words], check=True)
        assert result.stdout == "".join(f"[{word}]" for word in words)

    def test_cwd_env_user(self, sandbox: Sandbox) -> None:
        result = sandbox.exec("pwd; echo $GREETING; id -un", cwd="/tmp", env={"GREETING": "salut à tous"})
        assert result.stdout.splitlines()[1] == "salut à tous"
        assert result.stdout.splitlines()[0].endswith("/tmp")

    def test_default_user_and_root(self, sandbox: Sandbox) -> None:
        assert sandbox.exec("id -u", check=True).stdout == "1000\n"
        assert sandbox.exec("id -u", user="root", check=True).stdout == "0\n"
        assert sandbox.exec("sudo -n id -u", check=True).stdout == "0\n"

    def test_missing_program_is_127(self, sandbox: Sandbox) -> None:
        for command in (["no-such-program-here"], "no-such-program-here"):
            result = sandbox.exec(command)
            assert (result.status, result.exit_code) == ("exited", 127)

    def test_unknown_user_and_cwd_are_errors(self, sandbox: Sandbox) -> None:
        with pytest.raises(CpuosError) as caught:
            sandbox.exec("true", user="nobody-here")
        assert caught.value.code == "user_not_found"
        with pytest.raises(CpuosError) as caught:
            sandbox.exec("true", cwd="/no/such/folder")
        assert caught.value.code == "file_not_found"

    def test_check_raises_with_the_result(self, sandbox: Sandbox) -> None:
        with pytest.raises(CommandFailed) as caught:
            sandbox.exec("echo partial; exit 3", check=True)
        assert caught.value.result.exit_code == 3
        assert caught.value.result.stdout == "partial\n"

    def test_killed_by_a_signal(self, sandbox: Sandbox) -> None:
        result = sandbox.exec("kill -SEGV $$")
        assert (result.status, result.signal, result.exit_code) == ("signalled", 11, None)

    def test_timeout_keeps_output_and_ends_the_tree(self, sandbox: Sandbox) -> None:
        limit_s = 1
        while not sandbox.exec("test -e said").ok:  # a machine that stands still gives it no time to say anything
            started = time.monotonic()
            command = "echo before; touch said; (setsid sleep 4321 &); sleep 4321 & sleep 4321"
            result = sandbox.exec(command, timeout=limit_s)
            assert time.monotonic() - started < limit_s + 25
            assert result.status == "timed_out"
            limit_s *= 4
        assert result.stdout == "before\n"
        assert sandbox.exec("pgrep -fc '^sleep 4321'").stdout == "0\n"

    def test_returns_at_exit_though_a_child_holds_the_output(self, sandbox: Sandbox) -> None:
        started = time.monotonic()
        result = sandbox.exec("echo done; sleep 60 &")
        assert time.monotonic() - started < 30
        assert (result.exit_code, result.stdout) == (0, "done\n")

    # exec: stdin and output

    @pytest.mark.parametrize("command", ["cat", "grep x", "read v", "python3 -c 'input()'"])
    def test_stdin_is_at_its_end(self, sandbox: Sandbox, command: str) -> None:
        assert sandbox.exec(command, timeout=30).status == "exited"

    @pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20])
    def test_stdin_bytes_arrive(self, sandbox: Sandbox, size: int) -> None:
        data = os.urandom(size)
        result = sandbox.exec("sha256sum; cat >/dev/null", stdin=data, timeout=60)
        assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()

    def test_whole_lines_reach_the_callback_as_they_come(self, sandbox: Sandbox) -> None:
        lines: list[str] = []

        def take(line: str) -> None:
            lines.append(line)
            sandbox.files.write("heard", line)

        sandbox.exec(
            "printf 'h\\303'; sleep 0.3; printf '\\251llo\\n'; until test -e heard; do sleep 0.05; done; printf last",
            on_stdout=take,
            timeout=60,
            check=True,
        )
        assert lines == ["héllo", "last"]

    def test_large_output_keeps_head_and_tail(self, sandbox: Sandbox) -> None:
        size = 4_000_000 * self.scale
        result = sandbox.exec(f"head -c {size} /dev/zero | tr '\\0' A; echo END", timeout=60, max_output="64KiB")
        assert result.status == "exited"
        assert result.truncated
        assert result.stdout.startswith("AAAA")
        assert result.stdout.endswith("AEND\n")
        assert result.stdout_bytes == size + 4
        assert len(result.stdout_raw) <= 65536 + 4096
        kept = sandbox.commands.get(result.command_id).output(offset=0)
        assert hashlib.sha256(kept).digest() == hashlib.sha256(b"A" * size + b"END\n").digest()

    def test_bytes_through_a_program_are_exact(self, sandbox: Sandbox) -> None:
        """In and out at once: output that the host takes as fast as it comes, between pauses of the input."""
        for size in (70_000, 1_500_000, 3_000_000 * self.scale):
            data = os.urandom(size)
            for command in ("cat", "sleep 0.2; cat", "dd bs=8k status=none"):
                assert sandbox.exec(command, stdin=data, timeout=60, max_output="64MiB").stdout_raw == data

    def test_many_short_commands_at_once_keep_their_output(self, sandbox: Sandbox) -> None:
        """A busy machine must not turn output that was written into output that never was."""

        def run(number: int) -> str:
            return sandbox.exec(f"echo {number}", timeout=60).stdout

        with ThreadPoolExecutor(40) as pool:
            assert list(pool.map(run, range(120 * self.scale))) == [f"{n}\n" for n in range(120 * self.scale)]

    def test_streaming_gets_every_byte(self, sandbox: Sandbox) -> None:
        count = 20_000 * self.scale
        lines: list[str] = []
        sandbox.exec(f"seq 1 {count}", on_stdout=lines.append, timeout=60, check=True)
        assert lines == [str(number) for number in range(1, count + 1)]

    # jobs

    def test_spawn_wait_and_output(self, sandbox: Sandbox) -> None:
        job = sandbox.spawn("echo start; sleep 0.5; echo end; exit 4")
        assert job.id in [command.id for command in sandbox.commands.list()]
        result = job.wait(timeout=60)
        assert (result.status, result.exit_code, result.stdout) == ("exited", 4, "start\nend\n")
        assert sandbox.commands.get(job.id).output(offset=6) == b"end\n"

    def test_job_kill_ends_the_tree(self, sandbox: Sandbox) -> None:
        job = sandbox.spawn("sleep 8765 & setsid sleep 8765 & wait")
        time.sleep(0.5)
        job.kill()
        assert job.wait(timeout=60).status == "killed"
        assert sandbox.exec("pgrep -fc '^sleep 8765'").stdout == "0\n"

    def test_unknown_command(self, sandbox: Sandbox) -> None:
        with pytest.raises(NotFound):
            sandbox.commands.get("zzzzzzzzzzzzzzzz")

    # kept shell

    def test_shell_keeps_its_state(self, sandbox: Sandbox) -> None:
        shell = sandbox.shell()
        shell.run("cd /tmp && export X='a b' Y=2; f() { echo from-f; }")
        result = shell.run('echo "$X" $Y; f; pwd')
        assert result.stdout.splitlines()[:2] == ["a b 2", "from-f"]
        assert result.stdout.splitlines()[2].endswith("/tmp")

    @pytest.mark.parametrize(
        "nasty",
        [
            "cat <<EOF\nx\nEOF",
            "echo 'unbalanced",
            'echo "unbalanced',
            "exit 3",
            "set -e; false",
            "exec bash",
            "((",
            "}",
        ],
    )
    def test_shell_is_never_poisoned(self, sandbox: Sandbox, nasty: str) -> None:
        shell = sandbox.shell()
        shell.run(nasty, timeout=10)
        result = shell.run("echo ok")
        assert result.stdout == "ok\n" or result.shell_restarted

    # files

    @pytest.mark.parametrize("name", ODD_NAMES, ids=[f"name{number}" for number in range(len(ODD_NAMES))])
    def test_odd_names(self, sandbox: Sandbox, name: str) -> None:
        path, moved = f"/workspace/odd/{name}", f"/workspace/odd-moved/{name}"
        data = os.urandom(100)
        sandbox.files.write(path, data)
        assert name in [entry.name for entry in sandbox.files.list("/workspace/odd")]
        assert sandbox.files.stat(path).size == 100
        assert sandbox.files.read(path) == data
        sandbox.files.mkdir("/workspace/odd-moved")
        sandbox.files.move(path, moved)
        assert sandbox.files.read(moved) == data
        assert not sandbox.files.exists(path)
        sandbox.files.remove(moved)
        assert not sandbox.files.exists(moved)

    def test_name_that_is_not_utf8(self, sandbox: Sandbox) -> None:
        sandbox.exec("mkdir -p raw && printf x > raw/$'a\\xffb'", check=True)
        (entry,) = sandbox.files.list("/workspace/raw")
        assert os.fsencode(entry.name) == b"a\xffb"
        assert sandbox.files.read(entry.fs_path) == b"x"
        sandbox.files.move(entry.fs_path, entry.fs_path + "2")
        sandbox.files.remove(entry.fs_path + "2")
        assert sandbox.files.list("/workspace/raw") == []

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 16383, 18 * 1024, 65535, 65536, 1 << 20])
    def test_bytes_survive(self, sandbox: Sandbox, size: int) -> None:
        data = os.urandom(size)
        sandbox.files.write("bytes.bin", data)
        assert sandbox.files.read("bytes.bin") == data
        digest = sandbox.exec("sha256sum bytes.bin", check=True).stdout.split()[0]
        assert digest == hashlib.sha256(data).hexdigest()

    def test_overwrite_keeps_mode_and_replaces_the_target_of_a_link(self, sandbox: Sandbox) -> None:
        sandbox.exec("mkdir -p over; cd over; echo old > f; chmod 0750 f; ln f hard; ln -s f soft", check=True)
        sandbox.files.write("over/soft", b"new\n")
        result = sandbox.exec("cd over; cat f; stat -c %a f; readlink soft; cat hard", check=True)
        assert result.stdout.splitlines() == ["new", "750", "f", "old"]

    def test_file_errors(self, sandbox: Sandbox) -> None:
        files = sandbox.files
        with pytest.raises(CpuosError) as caught:
            files.read("no-such-file")
        assert caught.value.code == "file_not_found"
        with pytest.raises(FileConflict) as caught_conflict:
            files.read("/tmp")
        assert caught_conflict.value.code == "is_a_directory"
        with pytest.raises(PermissionDenied):
            files.write("/etc/cpuos-test", b"x")
        files.write("here", b"x")
        with pytest.raises(FileConflict):
            files.write("here", b"y", exclusive=True)
        with pytest.raises(FileConflict):
            files.write("here/below", b"y")
        with pytest.raises(CpuosError) as caught:
            files.write("n" * 256, b"x")
        assert caught.value.code == "file_name_invalid"
        files.mkdir("full/inner")
        with pytest.raises(FileConflict) as caught_conflict:
            files.remove("full")
        assert caught_conflict.value.code == "directory_not_empty"
        files.remove("full", recursive=True)
        assert files.read("here") == b"x"

    def test_folders_go_up_and_down(self, sandbox: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "project"
        (source / "deep" / "er").mkdir(parents=True)
        (source / "deep" / "er" / "data.bin").write_bytes(os.urandom(5000))
        (source / "run.sh").write_text("#!/bin/sh\necho hi\n")
        (source / "run.sh").chmod(0o755)
        (source / "empty").mkdir()
        sandbox.files.upload(source, "/workspace/project")
        assert sandbox.exec("./run.sh", cwd="/workspace/project", check=True).stdout == "hi\n"
        target = tmp_path / "back"
        sandbox.files.download("/workspace/project", target)
        assert (target / "deep/er/data.bin").read_bytes() == (source / "deep/er/data.bin").read_bytes()
        assert (target / "empty").is_dir()
        assert os.access(target / "run.sh", os.X_OK)

    def test_a_hostile_tree_stays_below_the_target(self, sandbox: Sandbox, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        sandbox.exec(
            f"mkdir -p evil && cd evil && ln -s {outside} link && ln -s /etc/passwd passwd && echo x > file"
            " && chmod 6777 file",
            check=True,
        )
        target = tmp_path / "target"
        sandbox.files.download("/workspace/evil", target)
        assert list(outside.iterdir()) == []
        assert (target / "file").stat().st_mode & 0o7000 == 0
        assert not (target / "passwd").exists() or (target / "passwd").is_symlink() is False

    # sandbox

    def test_record_says_what_it_is(self, client: Client, sandbox: Sandbox) -> None:
        again = Sandbox.connect(sandbox.id, client=client)
        assert again.state == "running"
        assert again.isolation == sandbox.isolation
        assert again.isolation_detail
        assert sandbox.id in [entry.id for entry in Sandbox.list(client=client)]
        assert Sandbox.connect(sandbox.id[:8], client=client).id == sandbox.id

    def test_kill_is_final_and_idempotent(self, client: Client) -> None:
        sandbox = Sandbox.create(client=client, **self.create_options)
        job = sandbox.spawn("sleep 1000")
        sandbox.kill()
        sandbox.kill()
        with pytest.raises((SandboxGone, Conflict, NotFound, AuthenticationError)):
            sandbox.exec("true")
        assert Sandbox.connect(sandbox.id, client=client).state == "stopped"
        assert job.id

    def test_idempotency_key_gives_the_same_sandbox(self, client: Client) -> None:
        key = f"order-{time.time_ns()}"
        with Sandbox.create(client=client, idempotency_key=key, **self.create_options) as first:
            second = Sandbox.create(client=client, idempotency_key=key, **self.create_options)
            assert second.id == first.id
            with pytest.raises(Conflict):
                Sandbox.create(client=client, idempotency_key=key, **{**self.create_options, "memory": "512MiB"})

    def test_bad_requests_are_refused(self, client: Client) -> None:
        with pytest.raises(NotFound) as caught:
            Sandbox.create(client=client, template="no-such-template")
        assert "no-such-template" in str(caught.value)
        for bad in ({"timeout": "soon"}, {"disk": "-1"}, {"memory": "much"}, {"name": "Not.A_Name"}, {"cpu": 0}):
            with pytest.raises(InvalidRequest):
                Sandbox.create(client=client, **bad)
        with pytest.raises(NotFound):
            Sandbox.connect("zzzzzzzzzzzzzzzzzzzz", client=client)

    def test_sandboxes_do_not_see_each_other(self, client: Client, sandbox: Sandbox) -> None:
        sandbox.files.write("/workspace/mine", b"secret")
        with Sandbox.create(client=client, **self.create_options) as other:
            assert not other.files.exists("/workspace/mine")
            assert other.exec("hostname").stdout != sandbox.exec("hostname").stdout
