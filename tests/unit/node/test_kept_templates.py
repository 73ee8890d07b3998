"""Images of templates for those that were begun with them: by a second name, or copied from another volume."""

from __future__ import annotations

import asyncio
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


def none() -> set[str]:
    return set()


async def test_one_of_another_volume_outlives_its_replacement(folders: tuple[Path, Path]) -> None:
    install(folders[0], "sha256:one", b"first")
    kept = store(folders)
    kept.begin(set())
    await asyncio.gather(*(kept.fetch("base", used=none) for _ in range(3)))
    assert kept.keep("base").digest == "sha256:one"
    image = kept.image("base", digest="sha256:one")
    assert image.is_relative_to(folders[1])
    assert list(folders[1].iterdir()) == [image]
    install(folders[0], "sha256:two", b"second")
    await kept.fetch("base", used=none)
    assert kept.image("base", digest="sha256:one") == image
    assert kept.has("base", digest="sha256:one")
    assert (image.read_bytes(), os.stat(image).st_mode & 0o777) == (b"first", 0o644)
    assert kept.image("base", digest="sha256:two").read_bytes() == b"second"
    assert [path.name for path in kept.unneeded({"sha256:two"})] == [image.name]


@pytest.mark.parametrize("known", ["from before", "by the ledger"])
async def test_what_was_begun_with_it_has_it_where_it_was(folders: tuple[Path, Path], known: str) -> None:
    install(folders[0], "sha256:one", b"first")
    kept = store(folders)
    kept.begin({"sha256:one"} if known == "from before" else set())
    await kept.fetch("base", used=lambda: {"sha256:one"} if known == "by the ledger" else set())
    await kept.fetch("base", used=none)
    assert kept.image("base", digest="sha256:one") == folders[0] / "base/root.erofs"


async def test_without_room_it_is_used_where_it_is(folders: tuple[Path, Path]) -> None:
    install(folders[0], "sha256:large", os.urandom(32 << 20))
    kept = store(folders)
    await kept.fetch("base", used=none)
    assert kept.image("base", digest="sha256:large") == folders[0] / "base/root.erofs"
    assert kept.keep("base").digest == "sha256:large"
    assert list(folders[1].iterdir()) == []


async def test_one_that_is_replaced_while_it_is_copied_is_not_kept(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folders[0], "sha256:one", b"first")
    copy = kept_templates._copy

    def late(source: Path, target: Path) -> None:
        copy(source, target)
        install(folders[0], "sha256:two", b"second")

    monkeypatch.setattr(kept_templates, "_copy", late)
    kept = store(folders)
    await kept.fetch("base", used=none)
    assert list(folders[1].iterdir()) == []
    monkeypatch.undo()
    await kept.fetch("base", used=none)
    assert kept.image("base", digest="sha256:two").read_bytes() == b"second"


def test_what_a_killed_daemon_left_goes(folders: tuple[Path, Path]) -> None:
    kept = store(folders)
    (folders[1] / ".0123456789abcdef").write_bytes(b"half")
    kept.begin(set())
    assert list(folders[1].iterdir()) == []


async def test_on_one_volume_it_is_a_second_name(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    install(tmp_path / "templates", "sha256:one", b"first")
    kept = store((tmp_path / "templates", tmp_path / "kept"))
    await kept.fetch("base", used=none)
    await kept.fetch("of a name that is not there", used=none)
    assert list((tmp_path / "kept").iterdir()) == []
    kept.keep("base")
    assert kept.image("base", digest="sha256:one").stat().st_nlink == 2
