"""Pause, resume, snapshots and forks from a shell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cpuos.testing.instance import Instance

pytestmark = pytest.mark.gvisor

CPUOS = str(Path(sys.executable).parent / "cpuos")
SMALL = ("--template", "base", "--memory", "128MiB", "--disk", "64MiB", "--cpu", "1", "--max-processes", "32")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(instance: Instance) -> Run:
    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = instance.environment()
        done = subprocess.run(
            [CPUOS, *arguments], stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=120, text=True
        )
        assert done.returncode == code, done.stderr
        return done

    return run


def test_a_round(run: Run) -> None:
    made = run("create", *SMALL, "--idle-timeout", "10m", "--on-timeout", "pause", "--json").stdout
    box = json.loads(made)
    assert (box["idle_timeout_s"], box["on_idle"], box["on_timeout"]) == (600, "pause", "pause")
    one = box["id"]
    run("exec", one, "--", "sh", "-c", "echo kept > /workspace/file")
    paused = run("pause", one)
    assert (paused.stdout, paused.stderr) == (f"{one}\n", "paused\n")
    (line,) = [line for line in run("ls").stdout.splitlines() if line.startswith(one)]
    assert " paused " in line
    assert line.endswith("of running")
    assert json.loads(run("resume", one, "--json").stdout)["state"] == "running"
    run("pause", one)
    assert run("exec", one, "--", "cat", "/workspace/file").stdout == "kept\n"

    snapshot = run("snapshot", one, "--name", "cli-snap").stdout.strip()
    assert json.loads(run("snapshots", "ls", "--sandbox", one, "--json").stdout)["snapshots"][0]["id"] == snapshot
    assert snapshot in run("snapshots", "ls").stdout
    other = run("create", "--snapshot", "cli-snap").stdout.strip()
    assert run("exec", other, "--", "cat", "/workspace/file").stdout == "kept\n"
    copies = run("fork", one, "-n", "2").stdout.split()
    more = json.loads(run("fork", "cli-snap", "--snapshot", "--json").stdout)["sandboxes"]
    assert (len(copies), len(more)) == (2, 1)
    run("snapshots", "rm", "cli-snap")
    assert snapshot not in run("snapshots", "ls", "-q").stdout
    for each in (one, other, *copies, more[0]["id"]):
        run("kill", each)


def test_what_cannot_be_done_is_said_in_three_lines(run: Run) -> None:
    for arguments in (
        ("pause", "nowhere"),
        ("resume", "nowhere"),
        ("snapshot", "nowhere"),
        ("fork", "nowhere"),
        ("fork", "nowhere", "--snapshot"),
        ("snapshots", "rm", "nowhere"),
        ("create", "--snapshot", "nowhere"),
        ("create", "--on-idle", "sleep"),
    ):
        code = 2 if "--on-idle" in arguments else 1
        what, why, hint = run(*arguments, code=code).stderr.strip().splitlines()
        assert what.startswith("cannot ")
        assert why
        assert hint.startswith("try: ")


def test_one_that_calls_do_not_resume(run: Run) -> None:
    one = run("create", *SMALL, "--no-auto-resume").stdout.strip()
    run("pause", one)
    refused = run("exec", one, "--", "true", code=125)
    assert f"try: cpuos resume {one}" in refused.stderr
    run("resume", one)
    run("exec", one, "--", "true")
    run("kill", one)
