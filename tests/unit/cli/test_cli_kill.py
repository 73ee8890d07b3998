"""`kill`: several sandboxes, or one command of one; no word is taken for what was not meant. And `logs`, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from cpuos.cli import commands
from cpuos.cli import exec as exec_module
from cpuos.cli.main import main
from cpuos.cli.output import Output
from cpuos.errors import Conflict, NotFound, SandboxGone

IDS = {"first": "a" * 20, "second": "b" * 20, "third": "c" * 20}


class Box:
    """A sandbox with a few commands."""

    def __init__(self, name: str, ids: list[str], ended: list[str]) -> None:
        self.id, self.info = IDS[name], SimpleNamespace(name=name, id=IDS[name])
        self._ended = ended
        self.refuses = False
        self.commands = SimpleNamespace(list=lambda: [self._job(identifier) for identifier in ids])

    def _job(self, identifier: str) -> Any:
        info = SimpleNamespace(argv=["sleep", "9 9"], started_at=0, stdout_bytes=0, stderr_bytes=0)
        info.status = SimpleNamespace(ended=True)
        kill = lambda signal: self._ended.append(f"{identifier} by {signal}")  # noqa: E731
        return SimpleNamespace(id=identifier, kill=kill, refresh=lambda: "told", info=info, follow=lambda: [])

    def kill(self) -> None:
        if self.refuses:
            raise SandboxGone(f"cannot kill {self.id}", "it is gone")
        self._ended.append(self.id)


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch, ended: list[str]) -> dict[str, Box]:
    made = {name: Box(name, ["beef" + "0" * 16, "second"], ended) for name in IDS}

    @contextmanager
    def connected(reference: str) -> Iterator[Any]:
        found = [box for box in made.values() if box.info.name == reference or box.id.startswith(reference)]
        if not found:
            raise NotFound(f"cannot find sandbox {reference!r}", "", code="sandbox_not_found", hint="cpuos ls")
        if len(found) > 1:
            raise Conflict("cannot tell", "", code="name_ambiguous")
        yield found[0]

    monkeypatch.setattr(commands, "connected", connected)
    return made


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["first"], [IDS["first"]]),
        (["a"], [IDS["first"]]),
        ([IDS["first"], IDS["second"]], [IDS["first"], IDS["second"]]),
        (["first", "third", IDS["second"]], [IDS["first"], IDS["third"], IDS["second"]]),
        (["first", IDS["first"], "first"], [IDS["first"]]),
        (["first", "beef"], ["beef" + "0" * 16 + " by KILL"]),
        (["first", "beef", "-s", "TERM"], ["beef" + "0" * 16 + " by TERM"]),
    ],
)
def test_what_each_word_means(words: list[str], wanted: list[str], ended: list[str], capsys: Any) -> None:
    assert main(["kill", *words]) == 0
    assert ended == wanted
    assert capsys.readouterr().out.split() == [thing.split()[0] for thing in wanted]


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["first", "second"], "it is a sandbox, and the start of a command's id"),
        (["first", "cc"], "neither the id or name of a sandbox nor a command"),
        (["first", "third", "cc"], "several words are sandboxes"),
        (["first", "third", "beef"], "several words are sandboxes"),
        (["none", "third"], "cannot find sandbox 'none'"),
    ],
)
def test_nothing_is_ended_on_a_guess(words: list[str], told: str, ended: list[str], capsys: Any) -> None:
    assert main(["kill", *words]) == 1
    assert told in capsys.readouterr().err
    assert ended == []


def test_one_that_cannot_be_ended_keeps_no_other(boxes: dict[str, Box], ended: list[str], capsys: Any) -> None:
    boxes["second"].refuses = True
    assert main(["kill", "first", IDS["second"], "third"]) == 1
    assert ended == capsys.readouterr().out.split() == [IDS["first"], IDS["third"]]


@pytest.mark.usefixtures("boxes")
def test_as_json(capsys: Any) -> None:
    assert main(["kill", "--json", "first"]) == 0
    assert "first" in json.loads(capsys.readouterr().out)
    assert main(["kill", "--json", "first", "third"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sandboxes"]) == 2
    assert main(["kill", "--json", "first", "beef"]) == 0
    assert json.loads(capsys.readouterr().out) == "told"


@pytest.mark.usefixtures("boxes")
def test_logs_of_nothing_say_so(capsys: Any) -> None:
    assert main(["logs", "first", "beef"]) == 0
    assert capsys.readouterr().err == f"cpuos: nothing was printed by beef{'0' * 16}: sleep '9 9'\n"


@pytest.mark.parametrize(
    "line",
    [
        ["exec", "--", "python3", "-c", "print(6 * 7)"],
        ["exec", "wc -l *.csv"],
        ["exec", "", "ls"],
        ["cp", "sales.csv", ":"],
        ["cp", ":/workspace/a", "."],
    ],
)
def test_an_empty_variable_is_told_as_such(line: list[str], capsys: Any) -> None:
    """`cpuos exec $box …` after a create that failed."""
    assert main(line) == 2
    assert capsys.readouterr().err.splitlines() == [
        "cannot tell which sandbox is meant: none is given",
        "a variable such as $box is empty when the create that should fill it has failed",
        f"try: cpuos {line[0]} --help",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["exec", "box", "--", "sleep", "9"], "interrupted; the command was ended, sandbox box runs on"),
        (
            ["exec", "--template", "base", "--", "sleep", "9"],
            "interrupted; the command was ended, and its sandbox with it",
        ),
    ],
)
def test_ctrl_c_says_one_line(line: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupt(*words: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(exec_module, "connected", interrupt)
    monkeypatch.setattr("cpuos.Sandbox.create", interrupt)
    assert main(line) == 130
    assert capsys.readouterr().err == f"cpuos: {told}\n"
    assert Output().interrupted == "interrupted"


def test_a_program_that_exits_with_130_was_not_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    @contextmanager
    def connected(reference: str) -> Iterator[Any]:
        yield None

    monkeypatch.setattr(exec_module, "connected", connected)
    monkeypatch.setattr(exec_module, "_run", lambda *words, **options: 130)
    assert main(["exec", "box", "--", "true"]) == 130
    assert capsys.readouterr().err == ""


def test_a_server_that_is_down_is_no_page_of_tracebacks() -> None:
    code = "from cpuos import Sandbox; Sandbox.create(client=__import__('cpuos').Client('http://127.0.0.1:9', 'cpk_x'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.count("Traceback") == 1
    assert "During handling" not in done.stderr
    assert "direct cause" not in done.stderr
    assert done.stderr.splitlines()[-3].startswith("cpuos.errors.Unavailable: cannot reach the cpuOS server")
