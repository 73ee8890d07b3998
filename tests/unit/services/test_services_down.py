"""What `down` tells: also the sandboxes that an earlier `down --keep-sandboxes` left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuos import services
from cpuos.cli.main import main
from cpuos.services.groups import running_sandboxes
from cpuos.settings import load_settings


def test_sandboxes_are_counted_once_over_all_hierarchies(tmp_path: Path) -> None:
    settings = load_settings(state_dir=tmp_path / "state", run_dir=tmp_path / "run")
    for hierarchy, sandbox, pids in (("cpu", "one", "12\n"), ("memory", "one", "12\n"), ("memory", "empty", "")):
        group = tmp_path / "groups" / hierarchy / f"cpuos-{settings.instance_id}" / sandbox
        group.mkdir(parents=True)
        (group / "cgroup.procs").write_text(pids)
    assert running_sandboxes(settings, root=tmp_path / "groups") == {"one"}
    assert running_sandboxes(settings, root=tmp_path / "nowhere") == set()


@pytest.mark.parametrize(
    ("stopped", "text"),
    [
        (services.Stopped(was_running=False), "cpuOS was not running"),
        (services.Stopped(was_running=False, sandboxes=1), "cpuOS was not running; 1 sandbox ended"),
        (services.Stopped(was_running=True, sandboxes=2), "cpuOS is stopped; 2 sandboxes ended"),
        (services.Stopped(was_running=True), "cpuOS is stopped"),
    ],
)
def test_down_tells_what_it_ended(
    stopped: services.Stopped, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "down", lambda *, keep_sandboxes, pause: stopped)
    assert main(["down"]) == 0
    assert capsys.readouterr().err == f"{text}\n"
    assert bool(stopped) is (stopped.was_running or stopped.sandboxes > 0)


def test_down_tells_what_it_paused_and_what_it_could_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, bool]] = []
    stopped = services.Stopped(was_running=True, paused=2, left={"a" * 20: "there was no time left"})
    monkeypatch.setattr(services, "down", lambda **how: asked.append(how) or stopped)
    assert main(["down", "--pause"]) == 1
    assert asked == [{"keep_sandboxes": False, "pause": True}]
    told = capsys.readouterr().err
    assert f"left running: {'a' * 20}: there was no time left\n" in told
    assert "cpuOS is stopped; 2 paused\n" in told
    assert main(["down", "--pause", "--keep-sandboxes"]) != 0
    assert len(asked) == 1
