"""The environments of several versions of the source, side by side."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpuos.settings import load_settings
from cpuos.setup import source
from cpuos.setup.host import Host


def make_environment(folder: Path, *, dependencies: str, modified: int) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "complete").write_text(dependencies)
    os.utime(folder, (modified, modified))
    return folder


def test_going_back_to_an_earlier_version_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "source_tree", lambda: tmp_path)
    settings = load_settings(data_dir=tmp_path / "data", state_dir=tmp_path / "state", run_dir=tmp_path / "run")
    venvs = settings.venv_dir
    for name in ("dependencies-old", "dependencies-new"):
        make_environment(venvs / name, dependencies="", modified=1)
    earliest = make_environment(venvs / "a", dependencies="dependencies-old", modified=1000)
    later = [
        make_environment(venvs / name, dependencies="dependencies-new", modified=2000 + index)
        for index, name in enumerate("bcde")
    ]
    with open(os.devnull, "w") as log:
        host = Host(settings, log=log, environment=earliest)
        source.install_environment(host)
        assert source.environment_is_current(host)
        assert (venvs / "current" / "complete").read_text() == "dependencies-old"
        assert (venvs / "dependencies-old").is_dir()
        assert earliest.stat().st_mtime > later[-1].stat().st_mtime, "the newest from now on"
        assert [path.exists() for path in later] == [False, False, True, True]

        host = Host(settings, log=log, environment=later[-1])
        source.install_environment(host)
        assert earliest.exists(), "and it stays when another follows"
