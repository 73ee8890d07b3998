"""Long steps say that they go on."""

from __future__ import annotations

import io
import sys

import pytest

from cpuos import live
from cpuos.cli import output as cli_output
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
