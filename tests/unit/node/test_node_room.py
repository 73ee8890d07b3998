"""Room on the volume: what is saved leaves what disks were promised, what is taken up again must only fit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpuos.node.storage.room import promised, require_fit, require_room

MIB = 1 << 20


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """1,000 MiB, of which 200 are free."""
    status = SimpleNamespace(f_frsize=MIB, f_blocks=1000, f_bavail=200)
    monkeypatch.setattr(os, "statvfs", lambda place: status)
    return status


def test_promised_is_what_sparse_images_do_not_hold(tmp_path: Path) -> None:
    assert promised(tmp_path, of=["a"]) == 0
    for name, written in (("a", 0), ("b", 3), ("paused", 0)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "image").open("wb") as file:
            file.write(os.urandom(written * MIB))
            file.truncate(8 * MIB)
    assert 12 * MIB < promised(tmp_path, of=["a", "b", "gone"]) <= 13 * MIB


@pytest.mark.usefixtures("volume")
@pytest.mark.parametrize(
    ("needed", "promised", "fits"),
    [(150, 0, True), (151, 0, False), (100, 100, True), (101, 100, False), (1, 300, False)],
)
def test_what_is_saved_leaves_a_share_or_what_is_promised(needed: int, promised: int, fits: bool) -> None:
    if fits:
        require_room(Path("/"), needed * MIB, promised=promised * MIB)
        return
    with pytest.raises(OSError, match=f"{needed} MiB are needed") as refused:
        require_room(Path("/"), needed * MIB, promised=promised * MIB)
    assert refused.value.errno == errno.ENOSPC


@pytest.mark.usefixtures("volume")
def test_what_is_taken_up_again_must_fit() -> None:
    require_fit(Path("/"), 184 * MIB)
    with pytest.raises(OSError, match="185 MiB are needed, and 184 MiB"):
        require_fit(Path("/"), 185 * MIB)
