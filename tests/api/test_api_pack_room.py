"""A workspace's room for data packs holds for calls at once too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from control_plane import Installation, error_of
from cpuos.server.packs import PackRules, _Made
from cpuos.testing.waiting import until

MIB = 1 << 20


class Guest:
    @asynccontextmanager
    async def open(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        yield _nothing()


async def _nothing() -> AsyncIterator[bytes]:
    for piece in ():
        yield piece


async def test_packs_at_once_do_not_all_fit(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, int] = {}
    packed = asyncio.Barrier(8)
    calls: list[asyncio.Task[Any]] = []

    async def pack(guest: Any, request: Any, *, work: str) -> _Made:
        await packed.wait()  # all of them have found room so far
        return _Made(size=40 * MIB, sha256="0" * 64, files=1)

    async def put_pack(image: str, *, size: int, sha256: str, content: Any) -> None:
        kept[image] = size
        await until(lambda: len(kept) + sum(call.done() for call in calls) >= 8)

    async with installation.serve(packs=PackRules(workspace_mib=100)) as server:
        packs = server.plane.packs
        monkeypatch.setattr(packs, "_pack", pack)
        monkeypatch.setattr(packs, "_clean", lambda guest, work: asyncio.sleep(0))
        monkeypatch.setattr(packs._gate, "guest", lambda row, actor: Guest())
        monkeypatch.setattr(installation.node, "put_pack", put_pack, raising=False)
        made = await server.created()

        def call(name: str) -> Any:
            return server.http.post(f"/v1/sandboxes/{made['id']}/packs", json={"name": name, "path": "/data"})

        calls += [asyncio.create_task(call(f"p{number}")) for number in range(8)]
        answers = await asyncio.gather(*calls)
        assert sum(kept.values()) <= 100 * MIB
        refused = [answer for answer in answers if answer.status_code != 201]
        assert {error_of(answer)["code"] for answer in refused} == {"limit_reached"}
        listed = (await server.http.get("/v1/packs")).json()["packs"]
        assert sum(pack["size_bytes"] for pack in listed) <= 100 * MIB
        packed = asyncio.Barrier(1)
        assert (await call("later")).status_code == (201 if len(listed) < 2 else 429)  # nothing of the refused is held
