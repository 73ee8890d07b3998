"""What somebody meets who does not know the command yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpuos import Sandbox
from cpuos.cli import copies, ports, shells
from cpuos.cli.main import main
from cpuos.cli.output import Output, in_future
from cpuos.cli.results import describe_capacity, describe_end, room_rows
from cpuos.client import TransferReport
from cpuos.errors import CpuosError, FileProblem, InvalidRequest, SandboxGone
from cpuos.types.port import PortAccess


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server: a port that nothing listens on."""
    monkeypatch.setenv("CPUOS_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("CPUOS_API_KEY", "cpk_none")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("group", ["profile", "template", "key"])
def test_a_group_alone_is_its_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group]) == 0
    captured = capsys.readouterr()
    assert f"Usage: cpuos {group}" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("stop", "down --help"),
        ("start", "up"),
        ("rm", "kill --help"),
        ("run", "exec --help"),
        ("lss", "ls --help"),
        ("prun", "prune --help"),
        ("kil", "kill --help"),
        ("help", "--help"),
        ("version", "--version"),
        ("odd", "--help"),
    ],
)
def test_words_of_other_tools(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    told = capsys.readouterr().err
    assert told.splitlines()[-1] == f"try: cpuos {meant}"
    assert "Did you mean" not in told, "one guess, not two that disagree"


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["shell", "box"], 125),
        (["exec", "box", "true"], 125),
        (["shell", "--nope", "box"], 2),
        (["exec", "--env", "x", "box", "true"], 2),
        (["create", "--label", "x"], 2),
        (["profile", "run", "python-data"], 2),
        (["profile", "run", "nope", "--script", "x.py"], 2),
    ],
)
def test_our_own_failures_have_a_code_apart_and_usage_errors_have_one_everywhere(
    arguments: list[str], code: int
) -> None:
    assert main(arguments) == code


@pytest.mark.usefixtures("away")
def test_a_profile_without_server_or_input_is_our_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    run = ["profile", "run", "python-data", "--out", str(tmp_path / "out"), "--script"]
    assert main([*run, str(script)]) == 2
    script.write_text("")
    assert main([*run, str(script)]) == 125
    assert main([*run, str(script), "--json"]) == 125


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    "options",
    [["--cpu", "0"], ["--max-processes", "0"], ["--name", ""], ["--memory", ""], ["--timeout", ""], ["--timeout", "0"]],
)
def test_nothing_and_zero_are_no_defaults(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["create", *options]) == 2
    told = capsys.readouterr().err
    assert "cannot reach" not in told, "refused before any call"


def test_without_a_key_alone_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CPUOS_API_KEY", raising=False)
    monkeypatch.setenv("CPUOS_API_URL", "http://127.0.0.1:9")
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("cannot find an API key for http://127.0.0.1:9 (by CPUOS_API_URL): CPUOS_API_KEY is not")
    assert "get a key for this user" in shown
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] is None


def test_ctrl_c_while_modules_load_has_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from cpuos.cli import run; raise SystemExit(run())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stderr) == (130, "")


def ended(status: str, **values: Any) -> Any:
    given = {"exit_code": None, "signal": None, "reason": "", "duration_s": 2.04, **values}
    return SimpleNamespace(status=status, **given)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (ended("exited", exit_code=3), ""),
        (ended("exited", exit_code=127, reason="no such program: x"), "no such program: x"),
        (ended("timed_out", signal=9), "the command timed out after 2 s and was killed with all its children"),
        (ended("signalled", signal=11), "the command was ended by signal 11 (SIGSEGV) after 2 s"),
        (ended("signalled", signal=99, duration_s=None), "the command was ended by signal 99"),
        (ended("oom_killed"), "the command ran out of the sandbox's memory of 512 MiB after 2 s (signal 9 (SIGKILL))"),
        (ended("killed", reason="by hand"), "the command was killed after 2 s: by hand"),
        (ended("signalled", signal=15, duration_s=0.01), "the command was ended by signal 15 (SIGTERM)"),
        (ended("limited", duration_s=1.26), "the command ended as limited after 1.3 s"),
    ],
)
def test_ends_are_told_with_their_numbers(end: Any, text: str) -> None:
    assert describe_end(end, memory_mib=512) == text


def test_time_left_is_rounded_up() -> None:
    now = datetime.now(UTC)
    assert in_future(now + timedelta(minutes=14, seconds=59.8)) == "15m"
    assert in_future(now + timedelta(seconds=29.5)) == "30s"


def test_room_is_one_line() -> None:
    amounts = {
        "sandboxes": (1, 64, 64),
        "cpu": (2, 16.0, 2),
        "memory_mib": (512, 12000, 13024),
        "disk_mib": (8192, 90000.4, 13298),
    }
    answer = {
        name: {"reserved": used, "total": total, "machine": there} for name, (used, total, there) in amounts.items()
    }
    assert describe_capacity(answer) == (
        "promised: 1 of at most 64 sandboxes, 2 of at most 16 CPU, "
        "512 MiB of at most 11.7 GiB memory, 8.0 GiB of at most 87.9 GiB disk"
    )
    assert room_rows(answer)[:3] == [
        ("sandboxes", "1", "64", ""),
        ("CPU", "2", "16", "2"),
        ("memory", "512 MiB", "11.7 GiB", "12.7 GiB"),
    ]


class Files:
    """A folder with a FIFO in it."""

    def __init__(self, problem: CpuosError | None = None) -> None:
        self.problem = problem

    def download(self, path: str, target: str) -> TransferReport:
        Path(target).mkdir(exist_ok=True)
        return TransferReport(files=1)

    def list(self, path: str, *, depth: int) -> list[Any]:
        if self.problem:
            raise self.problem
        return [SimpleNamespace(path=f"{path}/{name}", kind=kind) for name, kind in (("a", "file"), ("pipe", "other"))]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    found = Files()

    @contextmanager
    def connected(reference: str) -> Iterator[Any]:
        yield SimpleNamespace(files=found)

    monkeypatch.setattr(copies, "connected", connected)
    return found


def test_cp_names_what_it_left_out(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "--json", "box:/data", str(tmp_path / "new")]) == 0
    captured = capsys.readouterr()
    left_out = json.loads(captured.out)["left_out"]
    assert [entry["path"] for entry in left_out] == ["/data/pipe"]
    assert captured.err == "left out: /data/pipe: neither file, folder nor symbolic link\n"
    files.problem = FileProblem("cannot list", "it has too many entries", code="limit_reached")
    assert main(["cp", "box:/data/.", str(tmp_path / "new")]) == 0
    assert "could not be looked for: it has too many entries" in capsys.readouterr().err


@pytest.mark.usefixtures("files")
def test_cp_makes_no_parents_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "box:/data/a", str(tmp_path / "typo" / "a")]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"there is no folder {tmp_path / 'typo'}",
        f"try: mkdir -p {tmp_path / 'typo'}",
    ]
    assert list(tmp_path.iterdir()) == []


class Terminal:
    """A pty session that ends at once."""

    def __init__(self, end: Any) -> None:
        self.end = end

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> Any:
        if isinstance(self.end, CpuosError):
            raise self.end
        return self.end


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "_join", lambda session: None)
    stream = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(shells, "sys", SimpleNamespace(stdin=stream, stdout=stream))


def sandbox_with(end: Any, *, reason: str = "") -> Any:
    info = SimpleNamespace(id="box", state="stopped", reason=reason, memory_mib=512)
    return SimpleNamespace(id="box", info=info, refresh=lambda: info, pty=lambda command, **options: Terminal(end))


@pytest.mark.usefixtures("on_a_terminal")
@pytest.mark.parametrize(
    ("end", "reason", "told"),
    [
        (ended("exited", exit_code=0), "", ""),
        (ended("exited", exit_code=127, reason="no such program"), "", "\ncpuos: no such program\n"),
        (
            ended("killed"),
            "its time is over",
            "\ncpuos: the command was killed after 2 s; sandbox box is stopped: its time is over\n",
        ),
    ],
)
def test_a_shell_tells_why_it_ended(end: Any, reason: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    shells.run_terminal(Output(), sandbox_with(end, reason=reason), "bash", {})
    assert capsys.readouterr().err == told


@pytest.mark.usefixtures("on_a_terminal")
def test_a_shell_whose_sandbox_died_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SandboxGone):
        shells.run_terminal(Output(), sandbox_with(SandboxGone("its sandbox died", "")), "bash", {})
    assert capsys.readouterr().err == "\n"


def test_the_same_is_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    told = "cannot stat /workspace/no: file: no such file or directory"
    Output().error(FileProblem("cannot look at no: file", told, hint="cpuos exec box ls -la /workspace"))
    assert capsys.readouterr().err.splitlines()[1] == "/workspace/no: file: no such file or directory"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (["cp", "a b", "c d"], "cpuos cp 'a b' 'SANDBOX:c d'"),
        (["cp", "no such dir/x y", "box:"], "ls -l ."),
        (["cp", "x y", "box:"], "ls -l ."),
        (["create", "--label", "team"], "cpuos create --label team=research"),
    ],
)
@pytest.mark.usefixtures("away")
def test_lines_to_paste_are_quoted(
    line: list[str], step: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"try: {step}"


def test_the_sdk_refuses_the_same() -> None:
    with pytest.raises(InvalidRequest):
        Sandbox.create(cpu=0)


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("line", "why", "step"),
    [
        (["create", "--network", "of"], "it is internet or off", "cpuos create --network off"),
        (["net", "box", "--network", "of"], "it is internet or off", "cpuos net box --network off"),
        (["create", "--allow", "1.2.3.4/24"], "write 1.2.3.0/24, or 1.2.3.4", "cpuos create --allow '*.example.com'"),
        (["net", "box", "--deny", "https://a.example/"], "is a URL", "cpuos net box --deny '*.example.com'"),
        (["create", "--network", "off", "--allow", "*.a.example"], "only these", "cpuos create --allow '*.a.example'"),
        (["net", "box", "--network", "off", "--deny", "a.example"], "all but these", "cpuos net box --deny a.example"),
        (["net"], "either one sandbox or", "cpuos ls"),
        (["net", "box", "--workspace"], "either one sandbox or", "cpuos net --workspace"),
        (["net", "--workspace", "--network", "of"], "internet or off", "cpuos net --workspace --network off"),
        (["ports", "box", "3000", "--host", "x"], "localhost", "cpuos ports box 3000 --host localhost"),
    ],
)
def test_a_wrong_option_of_the_network_is_three_lines_for_the_shell(
    line: list[str], why: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert why in lines[1]
    assert lines[2] == f"try: {step}"


def _port(monkeypatch: pytest.MonkeyPatch, *, public: bool, problem: InvalidRequest | None = None) -> None:
    @contextmanager
    def connected(ref: str) -> Iterator[Any]:
        def publish(port: int, **options: Any) -> PortAccess:
            if problem is not None:
                raise problem
            expires = datetime.now(UTC) + timedelta(hours=1)
            return PortAccess(port=port, url="http://p.test/", public=False, token="t", expires_at=expires)

        yield SimpleNamespace(
            id="box", ports=SimpleNamespace(publish=publish, list=lambda: [SimpleNamespace(port=3000, public=public)])
        )

    monkeypatch.setattr(ports, "connected", connected)


@pytest.mark.parametrize(("public", "told"), [(True, "public without the token too"), (False, "private, for ")])
def test_a_url_with_a_token_does_not_call_a_public_port_private(
    public: bool, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _port(monkeypatch, public=public)
    assert main(["ports", "box", "3000"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "http://p.test/?cpuos_token=t\n"
    assert captured.err.startswith(told)


def test_an_expiry_too_long_is_told_with_a_line_for_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _port(
        monkeypatch, public=False, problem=InvalidRequest("cannot publish", "too long", hint='for example expires="1h"')
    )
    assert main(["ports", "box", "3000", "--expires", "8d"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "try: cpuos ports box 3000 --expires 12h"


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("box", "cpuos cp a.csv box:"),
        ("out/", "cpuos cp a.csv SANDBOX:out/"),
        ("there", "cpuos cp a.csv SANDBOX:there"),
    ],
)
def test_a_copy_without_a_sandbox_suggests_the_one_that_was_meant(
    target: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    assert main(["cp", "a.csv", target]) != 0
    assert capsys.readouterr().err.splitlines()[-1] == f"try: {line}"


def test_a_slash_in_a_name_is_no_route(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUOS_API_KEY", "cpk_x")
    assert main(["exec", "box/x", "--", "ls"]) != 0
    assert capsys.readouterr().err.splitlines()[:2] == [
        "cannot find sandbox 'box/x'",
        "no id and no name has a slash",
    ]


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("line", "why", "step"),
    [
        (
            ["profile", "run", "python-dta", "--script", "a b.py"],
            "python-data",
            "profile run python-data --script 'a b.py'",
        ),
        (["create", "--alow", "a.example"], "--allow is near", "create --allow a.example"),
        (["exec", "--timout", "3s", "box", "ls"], "--timeout is near", "exec --timeout 3s box ls"),
        (["kill", "--sgnal", "TERM", "box"], "--signal is near", "kill --help"),
        (["template", "buidl"], "no such command 'buidl'", "template build --help"),
    ],
)
def test_what_is_mistyped_hints_the_nearest(
    line: list[str], why: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.splitlines()[-1] == f"try: cpuos {step}"
