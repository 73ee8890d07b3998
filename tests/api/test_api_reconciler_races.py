"""The reconciler reads records, and decides a moment later: what this process does in between is not undone by it."""

from __future__ import annotations

import asyncio

import pytest

from control_plane import Server
from cpuos.server import reconciler
from cpuos.testing.waiting import until


class SlowRead:
    """What the reconciler read of all that lives, handed to it when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.goes_on = asyncio.Event(), asyncio.Event()
        read = reconciler.live_rows

        async def slow(connection):
            rows = await read(connection)
            self.done.set()
            await self.goes_on.wait()
            return rows

        monkeypatch.setattr(reconciler, "live_rows", slow)


async def create_ends(server: Server, creating: asyncio.Task) -> str:
    server.installation.node.create_gate.set()
    server.installation.node.answer_gate.set()
    answer = await creating
    assert answer.status_code == 201, answer.text
    return answer.json()["sandbox"]["id"]


@pytest.fixture
async def alone(server: Server) -> Server:
    """Only what a test asks of the reconciler is done."""
    await server.plane.reconciler.stop()
    return server


@pytest.mark.parametrize("listed", ["before the node had it", "when the node had it"])
async def test_a_create_that_ends_while_records_are_read_is_left_alone(
    alone: Server, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    server, node = alone, alone.installation.node
    late = listed.startswith("when")
    (node.answer_gate if late else node.create_gate).clear()
    creating = asyncio.create_task(server.create())
    await server.node_called(answering=late)
    slow = SlowRead(monkeypatch)
    sweeping = asyncio.create_task(server.plane.reconciler.sweep())
    await slow.done.wait()
    made = await create_ends(server, creating)
    slow.goes_on.set()
    await sweeping
    await server.plane.tasks.shared_ended()
    assert (await server.get(made))["state"] == "running"
    assert node.sandboxes[made].alive
    assert made in server.installation.gateway.attached
    assert not node.calls["delete"]


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_a_move_that_ends_while_records_are_read_is_left_alone(
    alone: Server, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    server, node = alone, alone.installation.node
    made = (await server.created())["id"]
    if verb == "resume":
        assert (await server.http.post(f"/v1/sandboxes/{made}/pause")).status_code == 200
    node.gates[verb].close()
    moving = asyncio.create_task(server.http.post(f"/v1/sandboxes/{made}/{verb}"))
    await until(lambda: node.gates[verb].waiting)
    slow = SlowRead(monkeypatch)
    sweeping = asyncio.create_task(server.plane.reconciler.sweep())
    await slow.done.wait()
    node.gates[verb].open()
    assert (await moving).status_code == 200
    before = node.calls.copy()
    slow.goes_on.set()
    await sweeping
    await server.plane.tasks.shared_ended()
    assert (await server.get(made))["state"] == ("paused" if verb == "pause" else "running")
    assert node.calls == before


async def test_what_nobody_works_at_is_still_ended(alone: Server) -> None:
    """An earlier process left it: nothing has changed since it was read."""
    server, node = alone, alone.installation.node
    made = (await server.created())["id"]
    del node.sandboxes[made]
    server.installation.clock.advance(60)
    await server.plane.reconciler.sweep()
    await server.plane.tasks.shared_ended()
    assert (await server.get(made))["state"] == "lost"
