"""The node's shutdown: what runs is paused, what cannot be runs on and is named, and nothing new begins."""

from __future__ import annotations

import asyncio

import pytest

from cpuos.errors import PlatformError, Unavailable
from cpuos.node.draining import SHUT_DOWN
from cpuos.services.health import ask

A, B = "a" * 20, "b" * 20


class FakeDoor:
    def __init__(self) -> None:
        self.frozen: dict[str, str] = {}
        self.thawed: list[str] = []
        self.refuses: dict[str, str] = {}
        self.slow_s = 0.0

    async def suspend(self, sandbox_id: str, *, freeze: str, limit_s: float) -> str:
        await asyncio.sleep(self.slow_s)
        self.frozen[sandbox_id] = freeze
        return self.refuses.get(sandbox_id, "")

    async def go_on(self, sandbox_id: str, *, generation: int, hostname: str, limit_s: float) -> None:
        self.thawed.append(sandbox_id)


@pytest.fixture
def door(node) -> FakeDoor:
    node.service._draining._door = FakeDoor()
    return node.service._draining._door


async def drained(node, *, limit_s: float = 30) -> tuple[list[str], dict[str, str]]:
    path = f"/v1/drain?limit_s={limit_s}"
    status, body = await asyncio.to_thread(ask, node.settings.node_socket, path, method="POST", timeout_s=60)
    assert status == 200
    return body["paused"], body["left"]


async def clean(node) -> None:
    for facts in await node.client.list():
        await node.client.delete(facts.id, generation=facts.generation)


async def test_what_runs_is_paused_and_says_why(node, asking, door):
    await node.client.create(asking())
    await node.client.create(asking("b"))
    await node.client.pause(B, generation=1, freeze="f" * 32)
    assert await drained(node) == ([A], {})
    facts = await node.client.get(A)
    assert (facts.paused, facts.pause_reason) == (True, SHUT_DOWN)
    assert facts.paused_at is not None
    assert (await node.client.get(B)).pause_reason == ""
    assert await node.parts.runtimes["fake"].leftovers() == []
    assert await drained(node) == ([], {})
    await clean(node)


async def test_nothing_new_runs_from_then_on(node, asking, door):
    await node.client.create(asking())
    policy = node.service.ledger.find(A).policy
    await drained(node)
    for call in (node.client.create(asking("b")), node.client.resume(A, generation=1, network=policy)):
        with pytest.raises(Unavailable, match="shutting down"):
            await call
    await clean(node)


@pytest.mark.parametrize("part", ["gateway", "node"])
async def test_what_cannot_be_paused_runs_on_and_is_named(node, asking, door, monkeypatch, part):
    await node.client.create(asking())
    await node.client.create(asking("b"))
    runtime = node.parts.runtimes["fake"]
    if part == "gateway":
        door.refuses[A] = "it does not answer"
    else:
        checkpoint = runtime.checkpoint

        async def fail(sandbox_id: str, *, image) -> None:
            if sandbox_id == A:
                raise PlatformError("cannot save it", "it does not answer")
            await checkpoint(sandbox_id, image=image)

        monkeypatch.setattr(runtime, "checkpoint", fail)
    assert await drained(node) == ([B], {A: "it does not answer"})
    assert not (await node.client.get(A)).paused
    assert door.thawed == ([] if part == "gateway" else [A])
    await clean(node)


async def test_its_time_is_limited(node, asking, door, monkeypatch):
    await node.client.create(asking())

    async def stuck(sandbox_id: str, *, image) -> None:
        await asyncio.sleep(0.5)
        image.mkdir()

    monkeypatch.setattr(node.parts.runtimes["fake"], "checkpoint", stuck)
    assert await drained(node, limit_s=0.2) == ([], {A: "there was no time left"})
    assert door.thawed == [A]
    assert not (await node.client.get(A)).paused
    await clean(node)
