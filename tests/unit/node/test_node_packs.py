"""Data packs on a node: bytes of a stated size and digest, kept while anything has them; who takes none says so."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cpuos.errors import Conflict, InvalidRequest, NotFound
from cpuos.node.packs import PackStore
from cpuos.testing.node import fake_node, fake_settings
from cpuos.types.node import NodeSandboxCreate

IMAGE, DATA = f"pack-{'a' * 20}", b"bytes" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()
SHAPE = {"generation": 1, "template": "python", "runtime": "fake", "hostname": "box", "cpu": 1, "memory_mib": 128}


async def content() -> AsyncIterator[bytes]:
    yield DATA[:100]
    yield DATA[100:]


async def test_a_pack_is_kept_told_and_removed() -> None:
    async with fake_settings() as settings, fake_node(settings) as node:
        with pytest.raises(InvalidRequest):
            await node.client.put_pack(IMAGE, size=len(DATA), sha256="0" * 64, content=content())
        with pytest.raises(InvalidRequest):
            await node.client.put_pack("built-" + "a" * 20, size=len(DATA), sha256=DIGEST, content=content())
        assert (await node.client.facts()).packs == []
        await node.client.put_pack(IMAGE, size=len(DATA), sha256=DIGEST, content=content())
        (pack,) = (await node.client.facts()).packs
        assert (pack.image, pack.digest, pack.size_bytes) == (IMAGE, f"sha256:{DIGEST}", len(DATA))
        kept = settings.node_state_dir / "packs" / IMAGE / "root.erofs"
        assert kept.read_bytes() == DATA
        await node.client.delete_pack(IMAGE)
        await node.client.delete_pack(IMAGE)  # nothing there is fine
        assert not kept.exists()


async def test_a_runtime_that_takes_none_refuses() -> None:
    async with fake_settings() as settings, fake_node(settings) as node:
        asked = NodeSandboxCreate(id="b" * 20, disk_mib=64, max_processes=64, packs={"/data/weather": IMAGE}, **SHAPE)
        with pytest.raises(InvalidRequest, match="data packs") as refused:
            await node.client.create(asked)
        assert refused.value.details == {"field": "packs"}
        assert await node.client.list() == []


async def test_what_is_used_stays(tmp_path: Path) -> None:
    packs = PackStore(tmp_path, max_bytes=1 << 20, reserve_bytes=0)
    await packs.store.put(IMAGE, content(), size=len(DATA), sha256=DIGEST)
    packs.require([IMAGE])
    with pytest.raises(Conflict) as used:
        await packs.delete(IMAGE, used={IMAGE})
    assert used.value.code == "pack_in_use"
    assert packs.mounts({"/b": IMAGE, "/a": IMAGE}) == tuple(
        (path, tmp_path / IMAGE / "root.erofs") for path in ("/a", "/b")
    )
    await packs.delete(IMAGE, used=set())
    with pytest.raises(NotFound) as missing:
        packs.require([IMAGE])
    assert missing.value.code == "pack_not_found"
