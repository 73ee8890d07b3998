"""Templates on disk: read once, and again as soon as one is another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cpuos.errors import NotFound
from cpuos.node.templates import Templates


def install(folder: Path, *, digest: str, image: bytes = b"image") -> None:
    """As set-up does: whole files in the place of the ones before."""
    folder.mkdir(exist_ok=True)
    for name, content in (
        ("root.erofs", image),
        ("manifest.json", json.dumps({"name": folder.name, "digest": digest, "size": len(image)}).encode()),
    ):
        draft = folder / f".{name}"
        draft.write_bytes(content)
        draft.rename(folder / name)


def test_another_one_in_its_place_is_seen(tmp_path: Path) -> None:
    templates = Templates(tmp_path)
    for number in range(5):  # of the same sizes
        install(tmp_path / "base", digest=f"sha256:{number}")
        assert templates.get("base").digest == f"sha256:{number}"
        assert [one.digest for one in templates.list()] == [f"sha256:{number}"]


def test_what_is_removed_or_damaged_is_seen(tmp_path: Path) -> None:
    templates = Templates(tmp_path)
    install(tmp_path / "base", digest="sha256:a")
    assert templates.get("base").digest == "sha256:a"
    (tmp_path / "base" / "root.erofs").write_bytes(b"more than that")
    assert templates.list() == []
    (tmp_path / "base" / "manifest.json").unlink()
    with pytest.raises(NotFound):
        templates.get("base")


def test_what_is_the_same_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = Templates(tmp_path)
    install(tmp_path / "base", digest="sha256:a")
    first = templates.get("base")
    reads = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read(path))
    assert templates.get("base") == first
    assert templates.list() == [first]
    assert not reads
    os.utime(tmp_path / "base" / "manifest.json")
    assert templates.get("base") == first
    assert len(reads) == 1
