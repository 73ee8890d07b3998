"""Long steps say that they go on."""

from __future__ import annotations

import io
import json
import sys
import time

import pytest

from cpuos import live
from cpuos.cli import output as cli_output
from cpuos.cli import templates
from cpuos.cli.output import Output
from cpuos.live import Work, told
from cpuos.testing.waiting import wait_until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_short_step_has_no_time_and_a_long_one_has() -> None:
    clock = Clock()
    work = Work("packing data", clock=clock)
    clock.now = 4.9
    assert work.line() == "packing data"
    clock.now = 75
    work.say("\x1b[2Jreading\x07 a.csv\n")
    work.say("\n")
    assert work.line() == "packing data (1 min 15 s)  [2Jreading a.csv"
    assert work.line(width=40) == "packing data (1 min 15 s)  [2Jreading a."
    assert work.line(width=30) == "packing data (1 min 15 s)"


def test_a_reader_that_went_away_ends_no_step() -> None:
    stream = io.StringIO()
    with told(Work("packing"), stream, every_s=0.001):
        wait_until(stream.getvalue)
        stream.close()
    with told(Work("packing"), stream, every_s=0.001):
        pass


@pytest.mark.parametrize("as_json", [False, True])
def test_a_pipe_is_told_now_and_then(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_output, "told", lambda work, stream: live.told(work, stream, every_s=0.001))
    output = Output()
    output.json = as_json
    written = []
    with output.working("looking"):
        wait_until(lambda: written.append(capsys.readouterr()) or "looking\n" in written[-1].err)
    assert all(one.out == "" for one in written)


def test_a_terminal_sees_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", stream)
    with Output().working("packing") as work:
        work.say("a.csv")
        wait_until(lambda: "a.csv" in stream.getvalue())
        print("one more line of the build", file=sys.stderr)
    assert "one more line of the build" in stream.getvalue()


def test_what_prints_by_itself_needs_no_line() -> None:
    clock = Clock()
    work, stream = Work("building", clock=clock), io.StringIO()
    clock.now = 20
    work.printed()
    with told(work, stream, every_s=0.001):
        clock.now = 20.0005
        time.sleep(0.01)  # its thread looks several times meanwhile
        assert stream.getvalue() == ""
        clock.now = 80
        wait_until(stream.getvalue)
    assert stream.getvalue().startswith("building (1 min 20 s)\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_build_s_lines_are_shown_as_they_come(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.json = as_json
    with templates._shown_output(output, "building") as tell:
        assert (tell is None) == as_json
        if tell is not None:
            tell("== run 1: echo x")
    assert capsys.readouterr() == ("", "" if as_json else "== run 1: echo x\n")


def test_lists_fields_and_removals_have_one_shape(capsys: pytest.CaptureFixture[str]) -> None:
    removed: list[str] = []
    output = Output()
    output.listing("things", [1, 2], ("NAME", "TWICE"), lambda one: (one, 2 * one), empty="nothing")
    output.fields({"a": 1}, [("a", 1)])
    output.removed(["x", "y"], removed.append)
    assert capsys.readouterr().out.split() == [
        "NAME",
        "TWICE",
        "1",
        "2",
        "2",
        "4",
        "FIELD",
        "VALUE",
        "a",
        "1",
        "x",
        "y",
    ]
    output.listing("things", [], ("NAME",), lambda one: (one,), empty="nothing")
    assert capsys.readouterr() == ("", "nothing\n")
    output.json = True
    output.listing("things", [1], ("NAME",), lambda one: (one,), empty="nothing")
    output.fields({"a": 1}, [("a", 1)])
    output.removed(["z"], removed.append)
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown == [{"things": [1]}, {"a": 1}, {"removed": ["z"]}]
    assert removed == ["x", "y", "z"]
