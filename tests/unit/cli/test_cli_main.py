"""The command as a whole: help, errors as three lines, exit codes, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpuos.cli.copies import split_place
from cpuos.cli.exec import CommandLine, execute
from cpuos.cli.main import main
from cpuos.cli.output import Output
from cpuos.cli.results import exit_code_of
from cpuos.cli.sandboxes import parse_pairs
from cpuos.errors import InvalidRequest, PlatformError

CPUOS = str(Path(sys.executable).parent / "cpuos")


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server: a port that nothing listens on."""
    monkeypatch.setenv("CPUOS_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("CPUOS_API_KEY", "cpk_none")
    monkeypatch.setenv("HOME", str(tmp_path))


def test_help_is_quick() -> None:
    """In processor time, so that what else the machine does is not counted."""

    def run() -> float:
        process = subprocess.Popen([CPUOS, "--help"], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        return usage.ru_utime + usage.ru_stime

    assert min(run() for _ in range(5)) <= 0.5


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from cpuos.cli.main import main; main(['--help']);"
        "print(sorted({'pydantic', 'httpx2', 'rich', 'websockets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command",
    [
        *("create", "ls", "exec", "ps", "logs", "kill", "shell", "cp", "audit", "profile run", "profile ls"),
        *("template ls", "up", "down", "status", "doctor", "setup", "uninstall"),
    ],
)
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert shown.splitlines()[2].strip().endswith("."), "one sentence says what it does"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("cpuos ")


def test_unknown_command_is_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["destroy"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    what, why, hint = captured.err.splitlines()
    assert what == "cannot read the command line: no such command 'destroy'"
    assert why.startswith("usage: cpuos")
    assert hint == "try: cpuos --help"


def test_usage_error_with_json_is_a_body(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["create", "--nope", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["code"] == "invalid_request"
    assert captured.err.startswith("cannot read the command line")


def test_exec_keeps_the_codes_of_commands_free(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec"]) == 2
    assert main(["exec", "--nope"]) == 2
    assert main(["exec", "box"]) == 2
    assert "no command is given" in capsys.readouterr().err


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("arguments", "code"), [(["ls"], 1), (["create"], 1), (["exec", "box", "--", "true"], 125), (["kill", "box"], 1)]
)
def test_no_server_says_what_to_do(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("cannot reach the cpuOS server")
    assert lines[2] == "try: cpuos up"


@pytest.mark.usefixtures("away")
def test_alone_shows_next_commands_though_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "not reachable" in shown
    assert shown.count("  cpuos") + shown.count("  sudo cpuos") == 3
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] is False


def test_missing_key_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CPUOS_API_KEY", raising=False)
    monkeypatch.delenv("CPUOS_API_URL", raising=False)
    assert main(["ls", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "key_missing"


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUOS_DEBUG", "1")
    with pytest.raises(InvalidRequest):
        main(["exec", "box"])


def test_a_reader_that_left_is_no_error() -> None:
    done = subprocess.run(["bash", "-c", f"{CPUOS} audit --help | true"], capture_output=True, text=True)
    assert done.stderr == ""


def test_errors_of_others_are_made_safe(capsys: pytest.CaptureFixture[str]) -> None:
    Output().error(PlatformError("cannot read file: \x1b]0;owned\x07", "it is \x1b[2J gone", hint="cpuos ls"))
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "sandbox", "command", "values"),
    [
        (["box", "--", "ls", "-la"], "box", ["ls", "-la"], {}),
        (["box", "ls", "-la", "--json"], "box", ["ls", "-la", "--json"], {}),
        (["--timeout", "5s", "box", "ls"], "box", ["ls"], {"timeout": "5s"}),
        (["box", "--timeout", "5s", "--", "ls", "--timeout", "9"], "box", ["ls", "--timeout", "9"], {"timeout": "5s"}),
        (["box", "-e", "A=1", "-e", "B=2", "env"], "box", ["env"], {"env": ["A=1", "B=2"]}),
        (["box", "--timeout=5s", "-i", "cat"], "box", ["cat"], {"timeout": "5s", "interactive": True}),
        (["box", "--", "--", "x"], "box", ["--", "x"], {}),
        (["--template", "base", "--", "id", "-u"], "id", ["-u"], {"template": "base"}),
        (["--template=base", "id", "-u"], "id", ["-u"], {"template": "base"}),
        (["box", "--", "echo", "--template"], "box", ["echo", "--template"], {}),
        (["box", "echo", "--template", "x"], "box", ["echo", "--template", "x"], {}),
        (["--json", "--template", "base", "id"], "id", [], {"template": "base", "as_json": True}),
    ],
)
def test_options_end_where_the_command_begins(
    arguments: list[str], sandbox: str, command: list[str], values: dict[str, object]
) -> None:
    import typer
    from typer.main import get_command

    app = typer.Typer()
    app.command("exec", cls=CommandLine)(execute)
    parser = get_command(app)
    context = parser.make_context("exec", arguments)
    assert context.params["sandbox"] == sandbox
    assert list(context.params["command"] or []) == command
    for name, value in values.items():
        assert context.params[name] == value


@pytest.mark.parametrize(
    ("status", "exit_code", "signal", "code"),
    [
        ("exited", 0, None, 0),
        ("exited", 3, None, 3),
        ("timed_out", None, 9, 124),
        ("signalled", None, 11, 139),
        ("killed", None, 9, 137),
        ("killed", None, None, 137),
        ("oom_killed", None, 9, 137),
        ("limited", None, None, 137),
        ("sandbox_lost", None, None, 125),
        ("unknown", None, None, 125),
        ("exited", None, None, 125),
    ],
)
def test_exit_codes(status: str, exit_code: int | None, signal: int | None, code: int) -> None:
    assert exit_code_of(status, exit_code=exit_code, signal=signal) == code


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("box:/etc/passwd", ("box", "/etc/passwd")),
        ("box:", ("box", "/workspace")),
        ("box:a:b", ("box", "a:b")),
        ("./a:b", None),
        ("/a:b", None),
        ("dir/a:b", None),
        ("plain", None),
        ("-", None),
        (":x", None),
    ],
)
def test_places(text: str, place: tuple[str, str] | None) -> None:
    assert split_place(text) == place


def test_pairs() -> None:
    assert parse_pairs(["a=1", "b=x=y", "c="], option="--label") == {"a": "1", "b": "x=y", "c": ""}
    for wrong in ("a", "=1"):
        with pytest.raises(InvalidRequest, match="--label"):
            parse_pairs([wrong], option="--label")


def test_interrupt_exits_as_shells_expect() -> None:
    code = "import signal, os\nfrom cpuos.cli import main as m\n"
    code += "m.overview.show = lambda ctx: os.kill(os.getpid(), signal.SIGTERM)\nraise SystemExit(m.main([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_the_light_client_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'starlette' else found(name, *rest)\n"
        "from cpuos.cli.main import main; raise SystemExit(main(['up', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "setup_required"
    assert error["try"] == "pip install 'cpuos[all]'"
