"""The data directory on a volume of its own: made, mounted again, refused and removed on real loop devices, and a fault
or the end of the program at each step."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuos.errors import CapacityExceeded, Conflict, SetupRequired
from cpuos.settings import Settings, load_settings
from cpuos.setup import volume
from cpuos.setup.host import Host
from cpuos.setup.trees import mount_points
from cpuos.setup.volume import (
    is_mounted,
    is_unmounted,
    make_volume,
    mount_first,
    mount_volume,
    remove_volume,
    volume_image,
)
from cpuos.setup.volume_copy import first_difference
from cpuos.testing.waiting import wait_until

MIB = 512
BEFORE = ["image", "mounted", "copied", "compared", "ready"]
AFTER = ["committed", "cleared"]
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: loop devices"),
    pytest.mark.skipif(shutil.which("mkfs.xfs") is None, reason="no mkfs.xfs: apt-get install xfsprogs"),
]


@pytest.fixture(scope="module", autouse=True)
def _kernel_has_xfs() -> None:
    if "xfs" not in Path("/proc/filesystems").read_text() and subprocess.run(["modprobe", "xfs"]).returncode:
        pytest.skip("this kernel has no XFS")


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """With data; at the end nothing is mounted, and no loop device is left."""
    data = tmp_path / "data"
    made = load_settings(data_dir=data, state_dir=data / "state", run_dir=tmp_path / "run")
    (data / "state/node").mkdir(parents=True)
    (data / "venv/current").mkdir(parents=True)
    (data / "venv/current/python").write_text("program")
    (data / "config.toml").write_text("max_sandboxes = 7\n")
    disk = data / "state/node/disk"
    with disk.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(5 << 20)
        file.write(os.urandom(100_000))
    os.link(disk, data / "state/node/second")
    os.chown(disk, 1234, 5678)
    disk.chmod(0o600)
    (data / "link").symlink_to("config.toml")
    yield made
    remove_volume(made, units=tmp_path)
    assert [point for point in mount_points() if point.startswith(f"{tmp_path}/")] == []
    wait_until(lambda: loops(tmp_path) == [])  # a namespace of somebody else may hold the mount a moment longer
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "original") == ["data"]


@pytest.fixture
def original(settings: Settings, tmp_path: Path) -> Path:
    subprocess.run(["cp", "--archive", "--sparse=always", settings.data_dir, tmp_path / "original"], check=True)
    return tmp_path / "original"


def loops(folder: Path) -> list[str]:
    told = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return [line for line in told if str(folder) in line]


def make(settings: Settings, *, mib: int = MIB, at: Callable[[str], None] = lambda point: None) -> bool:
    return make_volume(Host(settings, log=io.StringIO()), size_mib=mib, checkpoint=at, units=settings.data_dir.parent)


def is_as_it_was(settings: Settings, original: Path) -> bool:
    return first_difference(settings.data_dir, original, without={".volume-id"}) == ""


def test_the_data_moves_and_a_repeat_changes_nothing(settings: Settings, original: Path) -> None:
    assert make(settings)
    assert is_mounted(settings)
    assert settings.data_dir.is_mount()
    assert is_as_it_was(settings, original)
    assert volume_image(settings).stat().st_size == MIB << 20
    assert volume_image(settings).stat().st_blocks * 512 >= MIB << 20  # nobody else can fill it
    kept, copy = settings.data_dir / "state/node/disk", settings.data_dir / "state/copy"
    subprocess.run(["cp", "--reflink=always", kept, copy], check=True)
    copy.unlink()
    assert make(settings) is False
    with pytest.raises(Conflict) as caught:
        make(settings, mib=2 * MIB)
    assert f"{MIB} MiB" in caught.value.why
    escaped = str(settings.data_dir).strip("/").replace("-", "\\x2d").replace("/", "-")
    unit = settings.data_dir.parent / f"{escaped}.mount"
    assert f"Where={settings.data_dir}\n" in unit.read_text()
    removed = remove_volume(settings, units=settings.data_dir.parent)
    assert removed == [f"mount {settings.data_dir}", str(unit), str(volume_image(settings))]
    assert sorted(path.name for path in settings.data_dir.iterdir()) == [".volume", "config.toml", "venv"]
    assert remove_volume(settings, units=settings.data_dir.parent) == []


def test_after_a_restart_of_the_machine_it_is_mounted_again(settings: Settings, original: Path) -> None:
    make(settings)
    (settings.data_dir / "new").write_text("since")
    subprocess.run(["umount", settings.data_dir], check=True)
    assert (is_mounted(settings), is_unmounted(settings)) == (False, True)
    # What starts cpuOS is there without it.
    assert (settings.data_dir / "venv/current/python").read_text() == "program"
    assert load_settings(data_dir=settings.data_dir).max_sandboxes == 7
    assert mount_first(settings)
    assert mount_first(settings) is False
    assert (settings.data_dir / "new").read_text() == "since"
    (settings.data_dir / "new").unlink()
    assert is_as_it_was(settings, original)


def test_an_empty_directory_and_none_at_all(settings: Settings) -> None:
    shutil.rmtree(settings.data_dir)
    assert make(settings)
    assert is_mounted(settings)


@pytest.mark.parametrize("point", BEFORE)
def test_a_fault_leaves_all_as_it_was(settings: Settings, original: Path, point: str) -> None:
    def fail(passed: str) -> None:
        if passed == point:
            raise OSError("planned")

    with pytest.raises(OSError, match="planned"):
        make(settings, at=fail)
    assert (is_mounted(settings), is_unmounted(settings)) == (False, False)
    wait_until(lambda: loops(settings.data_dir.parent) == [])
    assert sorted(path.name for path in settings.data_dir.parent.iterdir()) == ["data", "original"]
    assert is_as_it_was(settings, original)
    assert make(settings)
    assert is_as_it_was(settings, original)


@pytest.mark.parametrize("point", [*BEFORE, *AFTER])
def test_whoever_comes_after_a_kill_ends_it(settings: Settings, original: Path, point: str) -> None:
    """Before the mark the data is as it was; from it on the volume has it, whatever starts first."""
    child = os.fork()
    if child == 0:
        make(settings, at=lambda passed: os._exit(9) if passed == point else None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if point in BEFORE:
        assert mount_volume(settings) is False
        assert is_as_it_was(settings, original)
        assert make(settings)
    else:
        assert is_unmounted(settings)
        assert mount_volume(settings)
    assert is_mounted(settings)
    assert is_as_it_was(settings, original)
    assert make(settings) is False


def test_a_write_meanwhile_is_seen(settings: Settings, original: Path) -> None:
    def write(passed: str) -> None:
        if passed == "copied":
            (settings.data_dir / "state/late").write_text("late")

    with pytest.raises(SetupRequired) as caught:
        make(settings, at=write)
    assert "state/late" in caught.value.what
    assert (settings.data_dir / "state/late").read_text() == "late"
    assert not volume_image(settings).exists()


def test_what_it_refuses(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(error: type[Exception], word: str, *, of: Settings = settings, mib: int = MIB) -> None:
        with pytest.raises(error) as caught:
            make(of, mib=mib)
        assert word in caught.value.why, caught.value
        assert caught.value.hint
        assert not (settings.data_dir.parent / "data.xfs.making").exists()

    refused(CapacityExceeded, "at least", mib=100)
    refused(CapacityExceeded, "free", mib=1 << 30)
    refused(Conflict, "outside", of=load_settings(data_dir=settings.data_dir, state_dir=tmp_path / "elsewhere"))
    monkeypatch.setattr(volume, "_processes", lambda settings: ["42"])
    refused(Conflict, "processes 42")
    monkeypatch.undo()
    (settings.data_dir / "state/mounted").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", settings.data_dir / "state/mounted"], check=True)
    try:
        refused(Conflict, "is mounted")
    finally:
        subprocess.run(["umount", settings.data_dir / "state/mounted"], check=True)
    attach = ["losetup", "--find", "--show", settings.data_dir / "state/node/disk"]
    device = subprocess.run(attach, capture_output=True, text=True, check=True).stdout.strip()
    try:
        refused(Conflict, device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
    volume_image(settings).write_text("of somebody else")
    with pytest.raises(Conflict):
        make(settings)
    assert volume_image(settings).read_text() == "of somebody else"
    volume_image(settings).unlink()
    subprocess.run(["mount", "-t", "tmpfs", "none", settings.data_dir], check=True)
    try:
        refused(Conflict, "made by somebody else")
    finally:
        subprocess.run(["umount", settings.data_dir], check=True)


def test_another_volume_in_its_place_is_not_taken(settings: Settings) -> None:
    make(settings)
    subprocess.run(["umount", settings.data_dir], check=True)
    image = volume_image(settings)
    kept = image.rename(image.with_name("kept"))
    with pytest.raises(SetupRequired) as caught:
        mount_volume(settings)
    assert "not there" in caught.value.what
    with image.open("wb") as file:
        file.truncate(MIB << 20)
    subprocess.run(["mkfs.xfs", "-q", image], check=True)
    with pytest.raises(SetupRequired) as caught:
        mount_volume(settings)
    assert "another volume" in caught.value.what
    assert not settings.data_dir.is_mount()
    kept.replace(image)
    assert mount_volume(settings)
