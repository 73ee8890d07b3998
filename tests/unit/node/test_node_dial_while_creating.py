"""A gateway may dial a sandbox that is still being made: the node answers as soon as it runs."""

from __future__ import annotations

import asyncio

import pytest

from cpuos.errors import Conflict, NotFound, PlatformError
from cpuos.node import service
from cpuos.testing.faults import Faults
from cpuos.testing.node import FakeNode, fake_node
from cpuos.testing.waiting import until

A = "a" * 20


@pytest.fixture
async def gate(node: FakeNode) -> asyncio.Event:
    """The runtime starts nothing before it is set."""
    gate = asyncio.Event()
    runtime = node.parts.runtimes["fake"]
    start = runtime.start

    async def start_later(spec):
        await gate.wait()
        return await start(spec)

    runtime.start = start_later
    return gate


async def begun(node: FakeNode, request) -> asyncio.Task:
    creating = asyncio.create_task(node.client.create(request))
    await until(lambda: node.service._creating._going_on)
    return creating


async def test_the_dial_is_answered_when_it_runs(node, asking, gate):
    creating = await begun(node, asking())
    dialling = asyncio.create_task(node.dial.dial(A, 1))
    await asyncio.sleep(0.02)
    assert not dialling.done()
    gate.set()
    dialled = await asyncio.wait_for(dialling, 20)
    dialled.socket.close()
    assert dialled.session_key
    assert (await creating).alive


async def test_another_generation_is_refused_at_once(node, asking, gate):
    creating = await begun(node, asking(generation=2))
    with pytest.raises(Conflict):
        await asyncio.wait_for(node.dial.dial(A, 1), 20)
    gate.set()
    await creating


async def test_a_long_create_is_told_so(node, asking, gate, monkeypatch):
    monkeypatch.setattr(service, "DIAL_WAIT_S", 0.01)
    creating = await begun(node, asking())
    with pytest.raises(Conflict, match="cannot reach sandbox") as caught:
        await node.dial.dial(A, 1)
    assert caught.value.code == "wrong_state"
    gate.set()
    await creating


async def test_a_create_that_fails_leaves_nothing_to_dial(settings, asking):
    dialling: list[asyncio.Task] = []

    def dial_now(point: str) -> None:
        dialling.append(asyncio.get_running_loop().create_task(node.dial.dial(A, 1)))

    class DialThenFail(Faults):
        def __call__(self, point: str) -> None:
            if point == "create.disk.before":
                dial_now(point)
            super().__call__(point)

    async with fake_node(settings, checkpoint=DialThenFail("create.start.before")) as node:
        with pytest.raises(PlatformError):
            await node.client.create(asking())
        with pytest.raises(NotFound) as caught:
            await asyncio.wait_for(dialling[0], 20)
        assert caught.value.code == "sandbox_not_found"
