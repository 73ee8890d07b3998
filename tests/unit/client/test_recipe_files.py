"""What a caller names as files of a template's build."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from cpuos.client._recipe import read_recipe_files
from cpuos.errors import InvalidRequest


def test_text_bytes_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "tool").write_bytes(b"#!/bin/sh\n")
    (folder / "b" / "tool").chmod(0o755)
    (folder / "a.txt").write_text("a")
    found = read_recipe_files(
        {"/opt/text": "é", "/opt/bytes": b"\0", "/opt/one": folder / "a.txt", "/srv/app/": folder}
    )
    assert [(file.path, file.size, oct(file.mode)) for file in found] == [
        ("/opt/text", 2, "0o644"),
        ("/opt/bytes", 1, "0o644"),
        ("/opt/one", 1, "0o644"),
        ("/srv/app/a.txt", 1, "0o644"),
        ("/srv/app/b/tool", 10, "0o755"),
    ]
    assert found[2].sha256 == hashlib.sha256(b"a").hexdigest()
    assert read_recipe_files(None) == []


@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "pipe", "nothing", "number"])
def test_what_cannot_be_a_file_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    place = folder / "it"
    if kind == "link to a file":
        place.symlink_to("/etc/hostname")
    elif kind == "link to a folder":
        place.symlink_to("/etc")
    elif kind == "pipe":
        os.mkfifo(place)
    named = {"nothing": place, "number": 3}.get(kind, folder)
    with pytest.raises(InvalidRequest) as refused:
        read_recipe_files({"/opt/x": named})
    assert ("/opt/x" if kind == "number" else str(place)) in str(refused.value)
