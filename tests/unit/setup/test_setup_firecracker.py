"""Firecracker from its release's archive: nothing of one with another sum is unpacked."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from cpuos.errors import InvalidRequest, SetupRequired
from cpuos.settings import load_settings
from cpuos.setup import firecracker
from cpuos.setup.firecracker import firecracker_is_current, firecracker_step, install_firecracker
from cpuos.setup.host import Host
from firecracker_host import Host as FakePrograms

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="what it installs is root's")

RELEASE = "release-v1.15.1-x86_64"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    folders = {"data_dir": tmp_path / "data", "state_dir": tmp_path / "state", "run_dir": tmp_path / "run"}
    return Host(load_settings(**folders), log=io.StringIO())


def pack(path: Path, programs: dict[str, Path]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, program in programs.items():
            archive.add(program, f"{RELEASE}/{name}-v1.15.1-x86_64")
    return path


def expect(monkeypatch: pytest.MonkeyPatch, archive: Path) -> None:
    monkeypatch.setattr(firecracker, "_SUM", hashlib.sha256(archive.read_bytes()).hexdigest())


def test_the_two_programs_are_installed_and_known_from_then_on(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(tmp_path / "archive.tgz", FakePrograms(tmp_path / "programs").programs)
    expect(monkeypatch, archive)
    step = firecracker_step(str(archive))
    assert not step.is_done(host)
    assert host.settings.vmm_programs == {}
    step.run(host)
    assert step.is_done(host)
    found = host.settings.vmm_programs
    assert set(found) == {"firecracker", "jailer"}
    assert all((path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o755) for path in found.values())


def test_an_archive_with_another_sum_is_refused_unopened(tmp_path: Path, host: Host) -> None:
    archive = pack(tmp_path / "archive.tgz", FakePrograms(tmp_path / "programs").programs)
    with pytest.raises(SetupRequired, match="has the sum") as caught:
        install_firecracker(host, archive=str(archive))
    assert "d4a32ab2322d887c" in str(caught.value.why)
    assert not host.settings.data_dir.exists()


def test_an_archive_without_the_jailer_installs_nothing(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = FakePrograms(tmp_path / "programs").programs
    archive = pack(tmp_path / "archive.tgz", {"firecracker": programs["firecracker"]})
    expect(monkeypatch, archive)
    with pytest.raises(SetupRequired, match="cannot install Firecracker"):
        install_firecracker(host, archive=str(archive))
    assert not firecracker_is_current(host)
    assert host.settings.vmm_programs == {}


def test_one_that_is_not_there(host: Host) -> None:
    with pytest.raises(SetupRequired, match="cannot read /none"):
        install_firecracker(host, archive="/none")


def test_named_programs_go_before_those_of_set_up(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, firecracker="/opt/firecracker", jailer="/opt/jailer")
    assert settings.vmm_programs == {"firecracker": Path("/opt/firecracker"), "jailer": Path("/opt/jailer")}


@pytest.mark.parametrize("one", ["firecracker", "jailer"])
def test_one_program_without_the_other_is_refused(one: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_settings(**{one: "/opt/program"})
    assert "set together" in str(caught.value.why)
