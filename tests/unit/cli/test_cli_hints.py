"""`try:` lines that this user can paste."""

from __future__ import annotations

import ast
import os
import pwd
import re
import shlex
import shutil
from pathlib import Path

import pytest

import cpuos
from cpuos import errors
from cpuos.cli.hints import hint_of, is_command, runnable
from cpuos.cli.main import app
from cpuos.errors import (
    ERRORS,
    AuthenticationError,
    CapacityExceeded,
    Conflict,
    InvalidRequest,
    NotFound,
    SandboxGone,
    Unavailable,
)


@pytest.fixture(params=["root", "with sudo", "without sudo"])
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if request.param == "root" else 1000)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/sudo" if request.param == "with sudo" else None)
    entry = pwd.struct_passwd(("someone", "x", 1000, 1000, "", "/home/someone", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda user: entry)
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("CPUOS_API_KEY", "CPUOS_API_URL", "SUDO_UID"):
        monkeypatch.delenv(name, raising=False)
    return request.param


def expected(user: str, command: str) -> str:
    return {"root": command, "with sudo": f"sudo {command}", "without sudo": f"su -c '{command}'"}[user]


@pytest.mark.parametrize("hint", ["cpuos up", "sudo cpuos up"])
def test_root_s_commands(user: str, hint: str) -> None:
    assert runnable(hint) == expected(user, "cpuos up")
    assert hint_of(Unavailable("cannot reach", "refused", hint=hint)) == expected(user, "cpuos up")


def test_parts_of_a_line_and_options(user: str) -> None:
    assert runnable("rm key && cpuos up") == "rm key && " + expected(user, "cpuos up")
    assert runnable("sudo cpuos uninstall --purge") == expected(user, "cpuos uninstall --purge")


@pytest.mark.parametrize(
    "hint", ["", "cpuos ls --all", "cpuos create", "cpuos upgrade", "cpuos doctor", "ls -l a/cpuos up"]
)
def test_other_hints_stay(user: str, hint: str) -> None:
    assert runnable(hint) == hint


def test_words_after_the_command_go() -> None:
    assert runnable("cpuos ls, then cpuos kill SANDBOX; or ask for less") == "cpuos ls"
    assert runnable("cpuos kill box, or use another name") == "cpuos kill box"
    assert runnable("cpuos status; cpuos up") == "cpuos status"
    assert runnable("cpuos ps --all box shows what is") == "cpuos ps --all box"
    assert runnable("cpuos exec box 'ls; echo a, b'") == "cpuos exec box 'ls; echo a, b'"


def test_words_of_the_sdk_become_options() -> None:
    error = InvalidRequest("cannot create sandbox: max_processes = 0", "", hint="for example max_processes=512")
    assert hint_of(error) == "cpuos create --max-processes 512"
    assert hint_of(InvalidRequest("cannot write", "", hint="for example mode=0o644"), ["cp"]) == (
        "cpuos cp --help  # for example mode=0o644"
    )


def test_a_sandbox_that_died_is_looked_up() -> None:
    assert hint_of(SandboxGone("it died", "", code="sandbox_lost", hint="cpuos audit --sandbox SANDBOX tells")) == (
        "cpuos ls --all"
    )


def test_a_missing_key(user: str) -> None:
    wanted = {
        "root": "cpuos up",
        "with sudo": "sudo cpuos up",
        "without sudo": "export CPUOS_API_KEY=$(su -c 'cpuos key create my-key')",
    }[user]
    assert hint_of(AuthenticationError("no key", "", code="key_missing", hint="cpuos up")) == wanted


def test_no_way_to_a_key_goes_in_a_circle(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `up` would write it somewhere else than this client looks, the way is another."""
    missing = AuthenticationError("no key", "", code="key_missing", hint="cpuos up")
    monkeypatch.setenv("HOME", "/elsewhere")
    by_name = f"export CPUOS_API_KEY=$({expected(user, 'cpuos key create my-key')})"
    assert hint_of(missing) == ("cpuos up" if user == "root" else by_name)
    monkeypatch.setenv("CPUOS_API_URL", "http://127.0.0.1:7080")
    assert hint_of(missing) == by_name
    monkeypatch.setenv("CPUOS_API_URL", "https://cpuos.example.com")
    assert hint_of(missing).startswith("export CPUOS_API_KEY=$(ssh cpuos.example.com ")


def test_a_wrong_key_from_the_environment(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUOS_API_KEY", "cpk_wrong")
    assert hint_of(AuthenticationError("wrong key", "", hint="check it")) == "unset CPUOS_API_KEY"


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_row_of_the_table_gives_a_line_for_the_shell(user: str, code: str) -> None:
    hint = hint_of(ERRORS[code][0]("cannot do it", code=code), ["create", "--json"])
    words = [word for word in shlex.split(hint, comments=True) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    assert is_command(hint), hint
    if "cpuos" in words[:2]:
        verb = words[words.index("cpuos") + 1]
        assert verb in {command.name for command in app.registered_commands} | {
            group.name for group in app.registered_groups
        }, hint


@pytest.mark.parametrize("part", ["cli", "profiles", "services", "setup"])
def test_what_our_own_commands_suggest_is_a_command(part: str) -> None:
    """Of each `hint=` the constant beginning; what begins with a value is made of one that was checked."""
    wrong = []
    for path in (Path(cpuos.__file__).parent / part).rglob("*.py"):
        if path.name == "hardening.py":  # settings of the host's kernel, not errors
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.keyword) and node.arg in ("hint", "fix")):
                continue
            value = node.value.values[0] if isinstance(node.value, ast.JoinedStr) else node.value
            if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
                continue
            begun = value.value.split(" '")[0]
            if not is_command(begun) and not is_command(f"{begun}cpuos"):  # assignments before it
                wrong.append(f"{path.name}:{value.lineno}: {value.value}")
    assert [line for line in wrong if "write fewer or smaller files" not in line] == []


def test_words_that_are_no_command_become_a_remark() -> None:
    error = Conflict("cannot do it", "", code="name_ambiguous", hint="use more letters of the id")
    assert hint_of(error, ["kill", "a"]) == "cpuos kill --help  # use more letters of the id"
    assert hint_of(error, ["template", "rm", "a"]) == "cpuos template rm --help  # use more letters of the id"
    assert hint_of(Unavailable("cannot", "", hint="repeat the call")) == "cpuos status  # repeat the call"
    assert hint_of(InvalidRequest("cannot", "", hint="sbx.ports.url(3000), or cpuos ports box 3000")) == (
        "cpuos ports box 3000"
    )
    quoted = "cpuos exec box ls -la 'no dir, or so', or sbx.files.list('no dir, or so')"
    assert hint_of(InvalidRequest("cannot", "", hint=quoted)) == "cpuos exec box ls -la 'no dir, or so'"


def test_the_line_that_was_given_comes_back_mended() -> None:
    wrong = InvalidRequest("cannot read timeout: '1hour'", "write 1h", details={"field": "timeout"})
    assert hint_of(wrong, ["create", "--timeout", "1hour", "--name", "a b"]) == (
        "cpuos create --timeout 15m --name 'a b'"
    )
    unknown = NotFound("no such", "", code="template_not_found", hint="cpuos create --template python")
    assert hint_of(unknown, ["exec", "--template", "pyton", "--", "python3", "-c", "1 + 1"]) == (
        "cpuos exec --template python -- python3 -c '1 + 1'"
    )
    assert hint_of(unknown, ["create", "-t", "pyton"]) == "cpuos create --template python"


def test_no_room_names_what_fits() -> None:
    short = {
        "cpu": {"asked": 64, "free": 3, "total": 16.0},
        "memory_mib": {"asked": 99999, "free": 800.5, "total": 12000.5},
        "disk_mib": {"asked": 8192, "free": 1, "total": 9000},
    }
    error = CapacityExceeded("no room", "", hint="cpuos create with at most …", details={"short": short})
    assert hint_of(error) == "cpuos create --cpu 3 --memory 800MiB"
    short["cpu"]["free"] = 0
    assert hint_of(error) == "cpuos ls"
    del short["cpu"], short["memory_mib"]
    assert hint_of(error) == "cpuos ls"
    assert hint_of(CapacityExceeded("no room", "")) == "cpuos ls"


_CALL = re.compile(r"\b(sbx|job|Network|Path|download|help|Sandbox|Template)\b\s*[.(=]|^for example|\w=[{\[\"']")


def hints_of_calls() -> list[str]:
    """Every constant hint of the SDK, the server and the gateway, and of the table of codes."""
    root = Path(cpuos.__file__).parent
    found = [words[1] for words in errors._WORDS.values()]
    for part in ("client/_async", "client", "server", "gateway", "types"):
        for path in (root / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.keyword) and node.arg == "hint" and "_sync" not in path.parts:
                    parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
                    text = "".join(
                        str(one.value) if isinstance(one, ast.Constant) else "'x'" if "!r" in ast.unparse(one) else "x"
                        for one in parts
                    )
                    if any(isinstance(one, ast.Constant) for one in parts):
                        found.append(text)
    return sorted(set(found))


def test_no_hint_is_a_call_of_the_sdk(user: str) -> None:
    known = hints_of_calls()
    assert "job.output(x, offset=x)" in {hint.replace("'x'", "x") for hint in known}
    shown = [hint_of(InvalidRequest("cannot do it", "", hint=hint), ["exec", "box", "ls"]) for hint in known]
    assert [hint for hint in shown if _CALL.search(hint)] == []


def test_what_the_api_calls_a_field_is_an_option_here() -> None:
    wire = InvalidRequest(
        "cannot read the request: timeout_s = -1",
        "",
        hint='for example "timeout_s": 900',
        details={"field": "timeout_s"},
    )
    assert hint_of(wire, ["exec", "--timeout", "-1s", "box", "ls"]) == "cpuos exec --timeout 15m box ls"
    label = InvalidRequest(
        "cannot create sandbox: labels.a", "", hint='for example labels={"team": "data"}', details={"field": "labels.a"}
    )
    assert hint_of(label, ["create", "--label", "a=b"]) == "cpuos create --label team=data"
    assert hint_of(label, ["fork", "-l", "a=b", "box"]) == "cpuos fork --help  # --label team=data"


def test_a_name_that_is_near_is_put_into_the_line() -> None:
    near = {"given": "pyton", "near": "python"}
    error = NotFound("cannot find template: 'pyton'", "", code="template_not_found", hint="cpuos x", details=near)
    assert hint_of(error, ["template", "inspect", "pyton", "--json"]) == "cpuos template inspect python --json"
    assert hint_of(error, ["template", "rm", "pyton"]) == "cpuos x", "what removes is for its user to write"


def test_an_error_that_names_a_command_knows_better_than_its_field() -> None:
    why = "no policy opens that"
    blocked = InvalidRequest("cannot allow 10.0.0.0/8", why, hint="cpuos doctor", details={"field": "allow"})
    assert hint_of(blocked, ["net", "--workspace", "--allow", "10.0.0.0/8"]) == "cpuos doctor"
