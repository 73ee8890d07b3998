"""An image goes whole: a daemon that ends while it removes one leaves all of it, or nothing that anybody takes up."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_image_digests import S, kept, sparse

from cpuos.node.images import ImageStore


class Killed(BaseException):
    pass


@pytest.mark.parametrize("point", ["before", "moved", "half"])
def test_a_daemon_that_ends_in_a_removal_leaves_no_half(tmp_path: Path, monkeypatch: Any, point: str) -> None:
    store, ram = kept(tmp_path, sparse)

    def killed(*args: Any, **options: Any) -> None:
        if point == "half":
            (Path(args[0]) / ram.relative_to(store.path(S))).unlink()
        raise Killed

    with monkeypatch.context() as patched:
        if point == "before":
            patched.setattr(Path, "rename", killed)
        else:
            patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            store.remove(S)
    later = ImageStore(tmp_path / "snapshots")
    assert later.list() == ([S] if point == "before" else [])
    assert later.has(S) == (point == "before")
    if point == "before":
        later.check(S, folders=["memory"])
    later.sweep()
    later.remove(S)
    assert os.listdir(tmp_path / "snapshots") == []
