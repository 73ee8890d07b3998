"""Images of builds on a node: whole and as announced, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cpuos.errors import Conflict, CpuosError, InvalidRequest, LimitReached
from cpuos.node.template_store import TemplateStore
from cpuos.node.templates import Templates

IMAGE = "built-aaaaaaaaaaaaaaaaaaaa"
CONTENT = b"image" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


async def pieces(content: bytes = CONTENT) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 777):
        yield content[start : start + 777]


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    return TemplateStore(tmp_path / "built", max_bytes=1 << 20, reserve_bytes=0)


async def test_an_image_is_kept_by_its_digest(store, tmp_path):
    await store.put(IMAGE, pieces(), size=len(CONTENT), sha256=DIGEST)
    templates = Templates(tmp_path / "installed", built=tmp_path / "built")
    found = templates.get(IMAGE)
    assert (found.digest, found.size_bytes, found.image.read_bytes()) == (f"sha256:{DIGEST}", len(CONTENT), CONTENT)
    assert [(facts.name, facts.built) for facts in templates.facts()] == [(IMAGE, True)]
    with pytest.raises(Conflict):
        await store.put(IMAGE, pieces(), size=len(CONTENT), sha256=DIGEST)
    await store.delete(IMAGE)
    await store.delete(IMAGE)
    assert list((tmp_path / "built").iterdir()) == []
    with pytest.raises(CpuosError) as unknown:
        templates.get(IMAGE)
    assert unknown.value.code == "template_not_found"


@pytest.mark.parametrize(
    ("content", "size", "sha256"),
    [(CONTENT[:-1], len(CONTENT), DIGEST), (CONTENT + b"x", len(CONTENT), DIGEST), (CONTENT, len(CONTENT), "0" * 64)],
    ids=["short", "long", "changed"],
)
async def test_what_is_not_as_announced_leaves_nothing(store, tmp_path, content, size, sha256):
    with pytest.raises(InvalidRequest):
        await store.put(IMAGE, pieces(content), size=size, sha256=sha256)
    assert list((tmp_path / "built").iterdir()) == []


async def test_a_sender_that_breaks_off_leaves_nothing(store, tmp_path):
    async def broken() -> AsyncIterator[bytes]:
        yield CONTENT[:100]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await store.put(IMAGE, broken(), size=len(CONTENT), sha256=DIGEST)
    assert list((tmp_path / "built").iterdir()) == []


async def test_limits_are_asked_before_a_byte_is_read(tmp_path):
    small = TemplateStore(tmp_path, max_bytes=10, reserve_bytes=0)
    full = TemplateStore(tmp_path, max_bytes=1 << 20, reserve_bytes=1 << 60)
    for store, code in ((small, "limit_reached"), (full, "disk_full")):
        with pytest.raises(LimitReached) as refused:
            await store.put(IMAGE, pieces(), size=len(CONTENT), sha256=DIGEST)
        assert refused.value.code == code
    for name in ("../x", "base", f"{IMAGE}/../x", IMAGE.upper()):
        with pytest.raises(InvalidRequest):
            await small.put(name, pieces(), size=1, sha256=DIGEST)
        with pytest.raises(InvalidRequest):
            await small.delete(name)


def test_what_a_killed_daemon_left_goes_at_the_next_start(store, tmp_path):
    left = tmp_path / "built" / f".{IMAGE}.abcd"
    left.mkdir(parents=True)
    (left / "root.erofs").write_bytes(b"half")
    store.clear_partial()
    assert list((tmp_path / "built").iterdir()) == []
