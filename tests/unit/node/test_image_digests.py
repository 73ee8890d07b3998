"""Digests of what is kept: of what a file says, wherever its volume keeps holes, and of those of an earlier version."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cpuos.errors import PlatformError
from cpuos.node.images import ImageStore, Manifest
from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy, PolicyLayer

S = "s" * 20
OFF = PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))
MIB = 1 << 20


def kept(folder: Path, write) -> tuple[ImageStore, Path]:
    """An image whose one large file was written so, with its digests."""
    store = ImageStore(folder / "snapshots")
    memory = store.begin(S) / "memory"
    memory.mkdir()
    with (memory / "ram").open("wb") as file:
        file.truncate(8 * MIB)
        write(file.fileno())
    shape = {"cpu": 1, "memory_mib": 256, "disk_mib": 64, "max_processes": 64}
    names = {"name": S, "sandbox": "a" * 20, "template": "base", "template_digest": "d", "runtime": "microvm"}
    policy = EffectivePolicy(version=1, layers=[OFF])
    count = {"generation": 1, "incarnation": 0, "runtime_version": "1"}
    store.commit(Manifest(**names, **shape, **count, policy=policy, created_at=datetime.now(UTC)))
    store.hash(S)
    return store, store.path(S) / "memory" / "ram"


def sparse(file: int) -> None:
    os.pwrite(file, b"here", 3 * MIB + 70_000)


def test_where_the_holes_are_makes_no_difference(tmp_path: Path) -> None:
    store, ram = kept(tmp_path, sparse)
    store.check(S, folders=["memory"])
    whole = ram.read_bytes()
    ram.write_bytes(whole)  # no hole is left
    store.check(S, folders=["memory"])


@pytest.mark.parametrize(
    ("data", "offset"), [(b"x", 0), (b"x", 8 * MIB - 1), (bytes(4), 3 * MIB + 70_000), (b"here", 5 * MIB)]
)
def test_a_byte_that_changed_is_seen(tmp_path: Path, data: bytes, offset: int) -> None:
    store, ram = kept(tmp_path, sparse)
    with ram.open("r+b") as file:
        os.pwrite(file.fileno(), data, offset)
    with pytest.raises(PlatformError, match="not as it was saved"):
        store.check(S, folders=["memory"])


def test_a_file_is_read_once_and_again_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ram = kept(tmp_path, sparse)
    monkeypatch.setattr("cpuos.node.images._SETTLED_NS", -1)
    store.check(S, folders=["memory"])
    reads = []
    monkeypatch.setattr("cpuos.node.images._sparse_digest", lambda path: reads.append(path) or "another")
    store.check(S, folders=["memory"])
    assert reads == []
    before = ram.stat()
    with ram.open("r+b") as file:
        os.pwrite(file.fileno(), b"x", 0)
    os.utime(ram, ns=(before.st_atime_ns, before.st_mtime_ns))  # as who wants to hide it would
    with pytest.raises(PlatformError, match="not as it was saved"):
        store.check(S, folders=["memory"])
    assert reads == [ram]


def test_what_was_just_written_is_read_again(tmp_path: Path) -> None:
    """A change within the volume's tick would have the same time."""
    store, _ram = kept(tmp_path, sparse)
    store.check(S, folders=["memory"])
    assert store._checked == {}


def test_a_block_that_moved_is_seen(tmp_path: Path) -> None:
    store, ram = kept(tmp_path, sparse)
    whole = ram.read_bytes()
    ram.write_bytes(whole[MIB:] + bytes(MIB))
    with pytest.raises(PlatformError, match="not as it was saved"):
        store.check(S, folders=["memory"])


def test_digests_of_an_earlier_version_are_good(tmp_path: Path) -> None:
    store, ram = kept(tmp_path, sparse)
    digests = ram.parent.parent / "digests.json"
    plain = store._digests(S, ("memory", "root"), digest=_plain)
    text = json.dumps({"name": S, "files": plain}).encode()
    digests.write_text(json.dumps({"text": text.decode(), "mac": store._sign(b"digests", text)}))
    store.check(S, folders=["memory"])
    with ram.open("r+b") as file:
        os.pwrite(file.fileno(), b"x", 0)
    with pytest.raises(PlatformError, match="not as it was saved"):
        store.check(S, folders=["memory"])


def _plain(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
