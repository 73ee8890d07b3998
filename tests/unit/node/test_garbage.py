"""What nothing needs is marked, goes when it bore the mark for long enough, and is never there as a half."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cpuos.node.garbage import GRACE, Garbage

START = datetime(2026, 1, 1, tzinfo=UTC)
POINTS = [f"garbage.{step}.{when}" for step in ("mark", "move", "empty") for when in ("before", "after")]
ROUND = """
import os, signal, sys
from datetime import datetime
from pathlib import Path
from cpuos.node.garbage import Garbage
folder, at, dies_at = Path(sys.argv[1]), datetime.fromisoformat(sys.argv[2]), sys.argv[3]

def checkpoint(point):
    if point == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

garbage = Garbage(folder, clock=lambda: at, checkpoint=checkpoint)
garbage.empty()
for path in garbage.mark([path for path in (folder / "things").iterdir() if path.name.startswith("old")]):
    garbage.move(path)
garbage.empty()
"""


def fill(folder: Path) -> None:
    for name in ("old-folder", "new-folder"):
        (folder / "things" / name / "deep").mkdir(parents=True)
        for number in range(20):
            (folder / "things" / name / "deep" / f"{number}").write_bytes(b"x" * 100)
    (folder / "things" / "old-file").write_bytes(b"x")


def round_of(folder: Path, *, at: datetime, dies_at: str = "") -> int:
    command = [sys.executable, "-c", ROUND, str(folder), at.isoformat(), dies_at]
    return subprocess.run(command, env={**os.environ}).returncode


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_step_nothing_is_half_there(tmp_path: Path, point: str) -> None:
    fill(tmp_path)
    codes = [round_of(tmp_path, at=START, dies_at=point), round_of(tmp_path, at=START + GRACE, dies_at=point)]
    assert -9 in codes  # the point was passed
    things = {path.name: path for path in (tmp_path / "things").iterdir()}
    for path in things.values():
        assert path.is_file() or len(list(path.rglob("*"))) == 21
    assert "new-folder" in things
    for late in (2 * GRACE, 3 * GRACE + timedelta(seconds=1)):
        assert round_of(tmp_path, at=START + late) == 0
    assert os.listdir(tmp_path / "things") == ["new-folder"]
    assert sorted(os.listdir(tmp_path)) == ["garbage.json", "things"]


def test_only_what_was_unneeded_without_a_break_goes(tmp_path: Path) -> None:
    now = [START]
    garbage = Garbage(tmp_path, clock=lambda: now[0], checkpoint=lambda point: None)
    one = tmp_path / "one"
    one.touch()
    assert garbage.mark([one]) == []
    now[0] += GRACE / 2
    assert garbage.mark([]) == []  # needed again
    now[0] += GRACE / 2
    assert garbage.mark([one]) == []
    now[0] += GRACE - timedelta(seconds=1)
    assert garbage.mark([one]) == []
    now[0] += timedelta(seconds=1)
    assert garbage.mark([one]) == [one]
    assert garbage.mark([one], grace=timedelta()) == [one]
    garbage.move(one)
    garbage.move(one)  # nothing there is fine
    assert not one.exists()


def test_marks_that_cannot_be_read_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "garbage.json").write_text("{")
    garbage = Garbage(tmp_path, clock=lambda: START + 10 * GRACE, checkpoint=lambda point: None)
    assert garbage.mark([tmp_path / "one"]) == []
