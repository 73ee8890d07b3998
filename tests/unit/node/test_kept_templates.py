"""Images of templates for those that were begun with them: by a second name, or copied from another volume."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos.node import kept_templates
from cpuos.node.kept_templates import KeptTemplates
from cpuos.node.templates import Templates

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another volume")


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Templates here, and what is kept on another volume."""
    templates, other = tmp_path / "templates", tmp_path / "other"
    templates.mkdir()
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", other], check=True)
    yield templates, other / "kept"
    subprocess.run(["umount", other], check=True)


def install(templates: Path, digest: str, content: bytes, name: str = "base") -> None:
    """As set-up does: another file in the same place."""
    folder = templates / name
    folder.mkdir(exist_ok=True)
    (folder / "new").write_bytes(content)
    (folder / "new").replace(folder / "root.erofs")
    (folder / "manifest.json").write_text(json.dumps({"name": name, "digest": digest, "size": len(content)}))


def store(folders: tuple[Path, Path]) -> KeptTemplates:
    return KeptTemplates(folders[1], templates=Templates(folders[0]))


def test_one_of_another_volume_outlives_its_replacement(folders: tuple[Path, Path]) -> None:
    install(folders[0], "sha256:one", b"first")
    kept = store(folders)
    kept.copy_others(set())
    kept.copy_others(set())
    assert kept.keep("base").digest == "sha256:one"
    image = kept.image("base", digest="sha256:one")
    assert image.is_relative_to(folders[1])
    install(folders[0], "sha256:two", b"second")
    assert kept.image("base", digest="sha256:one") == image
    assert image.read_bytes() == b"first"
    assert kept.has("base", digest="sha256:one")
    assert os.stat(image).st_mode & 0o777 == 0o644
    # What is begun with the new one before the next start has it where it is, and goes on there.
    assert kept.keep("base").digest == "sha256:two"
    assert kept.image("base", digest="sha256:two") == folders[0] / "base/root.erofs"
    kept.copy_others({"sha256:two"})
    assert kept.image("base", digest="sha256:two") == folders[0] / "base/root.erofs"
    kept.copy_others(set())
    assert kept.image("base", digest="sha256:two").read_bytes() == b"second"
    assert [path.name for path in kept.unneeded({"sha256:two"})] == [image.name]


def test_without_room_it_is_used_where_it_is(folders: tuple[Path, Path]) -> None:
    install(folders[0], "sha256:large", bytes(1) + os.urandom(32 << 20))
    kept = store(folders)
    kept.copy_others(set())
    assert kept.image("base", digest="sha256:large") == folders[0] / "base/root.erofs"
    assert kept.keep("base").digest == "sha256:large"
    assert list(folders[1].iterdir()) == []


def test_one_that_is_replaced_while_it_is_copied_is_not_kept(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folders[0], "sha256:one", b"first")
    copy = kept_templates._copy

    def late(source: Path, target: Path) -> None:
        copy(source, target)
        install(folders[0], "sha256:two", b"second")

    monkeypatch.setattr(kept_templates, "_copy", late)
    kept = store(folders)
    kept.copy_others(set())
    assert list(folders[1].iterdir()) == []


def test_what_a_killed_daemon_left_goes(folders: tuple[Path, Path]) -> None:
    kept = store(folders)
    (folders[1] / ".0123456789abcdef").write_bytes(b"half")
    kept.copy_others(set())
    assert list(folders[1].iterdir()) == []


def test_on_one_volume_it_is_a_second_name(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    install(tmp_path / "templates", "sha256:one", b"first")
    kept = store((tmp_path / "templates", tmp_path / "kept"))
    kept.copy_others(set())
    assert list((tmp_path / "kept").iterdir()) == []
    kept.keep("base")
    assert kept.image("base", digest="sha256:one").stat().st_nlink == 2
