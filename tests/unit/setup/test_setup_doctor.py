"""Doctor on a machine that lacks everything in its data directory, and the plan that would mend it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cpuos.errors import Conflict
from cpuos.settings import Settings, load_settings
from cpuos.setup.doctor import Check, CheckState, doctor, doctor_lines
from cpuos.setup.steps import all_steps
from cpuos.setup.trees import mount_points, remove_tree


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", state_dir=tmp_path / "state", run_dir=tmp_path / "run")


def test_what_is_missing_is_told_with_the_command_that_mends_it(settings: Settings) -> None:
    checks = {check.name: check for check in doctor(settings, probe=False)}
    for name in ("environment", "runsc", "agent", "template python", "template base"):
        assert checks[name].state is CheckState.MISSING
        assert checks[name].fix == "sudo cpuos setup"
        assert str(settings.data_dir) in checks[name].evidence
    assert checks["sidecars"].state is CheckState.WARNING
    for name in ("node", "server", "gateway"):
        assert checks[name].state is CheckState.WARNING
    for check in checks.values():
        assert bool(check.fix) == (check.state is not CheckState.OK), check
    json.dumps([dataclasses.asdict(check) for check in checks.values()])
    assert not settings.data_dir.exists(), "doctor only looks"


def test_what_copies_cost_is_told(settings: Settings) -> None:
    volume = next(check for check in doctor(settings, probe=False) if check.name == "data volume")
    copies = "snapshots and forks are copies; to have them share blocks: sudo cpuos setup storage" in volume.evidence
    assert copies or "snapshots and forks share blocks" in volume.evidence
    # As after a restart of the machine, before `cpuos up`.
    settings.data_dir.mkdir(exist_ok=True)
    (settings.data_dir / ".volume").write_text("{}")
    volume = next(check for check in doctor(settings, probe=False) if check.name == "data volume")
    assert (volume.state, volume.fix) == (CheckState.MISSING, "sudo cpuos up")


def test_another_runsc_is_told(settings: Settings) -> None:
    settings.runsc_path.parent.mkdir(parents=True)
    settings.runsc_path.write_text("#!/bin/sh\necho runsc version release-2022\n")
    settings.runsc_path.chmod(0o755)
    check = next(check for check in doctor(settings, probe=False) if check.name == "runsc")
    assert check.state is CheckState.MISSING
    assert "release-2022" in check.evidence


def test_the_text_ends_with_the_next_step() -> None:
    good = Check(name="a", state=CheckState.OK, evidence="fine")
    bad = Check(name="longer", state=CheckState.MISSING, evidence="gone", fix="do this")
    assert doctor_lines([good])[-1] == "everything is in place"
    assert doctor_lines([good, bad]) == [
        "ok       a       fine",
        "MISSING  longer  gone",
        "                 try: do this",
        "1 missing; first: do this",
    ]
    poor = Check(name="b", state=CheckState.WARNING, evidence="not root", fix="look as root")
    assert doctor_lines([good, poor])[-1] == "nothing is missing; 1 warning; first: look as root"


def test_steps_have_names_and_costs() -> None:
    steps = all_steps(example=True)
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.plan and step.duration_s > 0 for step in steps)
    assert [step.name for step in steps if step.name not in {other.name for other in all_steps()}] == ["example"]


def test_a_tree_is_removed_whole(tmp_path: Path) -> None:
    (tmp_path / "tree" / "below").mkdir(parents=True)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
    remove_tree(tmp_path / "tree")


def test_a_mounted_tree_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree" / "proc").mkdir(parents=True)
    monkeypatch.setattr("cpuos.setup.trees.mount_points", lambda: ["/", "/proc", str(tmp_path / "tree" / "proc")])
    with pytest.raises(Conflict, match="still mounted"):
        remove_tree(tmp_path / "tree")
    assert (tmp_path / "tree" / "proc").is_dir()
    assert "/proc" in mount_points()
