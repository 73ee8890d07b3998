"""A node that is shut down pauses what runs: the server's records follow, and calls bring it back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from control_plane import Server, check_nothing_is_left
from cpuos.node.draining import SHUT_DOWN
from cpuos.testing.waiting import until


async def shut_down(server: Server, sandbox: str) -> None:
    """As a node does it: by itself, through the gateway."""
    node, gateway = server.installation.node, server.installation.gateway
    await gateway.suspend(sandbox, freeze="f" * 32)
    changed = node._set(
        node.sandboxes[sandbox],
        paused=True,
        settled=True,
        pause_reason=SHUT_DOWN,
        paused_at=server.installation.clock.now,
    )
    await node._tell(changed)


async def test_its_word_is_taken_at_once(server: Server) -> None:
    sandbox = (await server.created(name="one", timeout_s=900))["id"]
    server.installation.clock.advance(300)
    await shut_down(server, sandbox)
    await server.plane.reconciler.take_changes(server.installation.node.log[-1:])
    await server.plane.tasks.shared_ended()
    told = await server.get("one")
    assert (told["state"], told["reason"], told["expires_at"]) == ("paused", SHUT_DOWN, None)
    assert told["left_s"] == pytest.approx(600, abs=1)
    await check_nothing_is_left(server)


async def test_time_stood_still_while_the_machine_was_off(server: Server) -> None:
    sandbox = (await server.created(name="one", timeout_s=900))["id"]
    server.installation.clock.advance(300)
    await shut_down(server, sandbox)
    at = server.installation.clock.now
    server.installation.clock.advance(86400)
    await server.settle()
    told = await server.get("one")
    assert (told["state"], told["paused_at"][:19]) == ("paused", at.isoformat()[:19])
    assert told["left_s"] == pytest.approx(600, abs=1)
    resumed = (await server.http.post("/v1/sandboxes/one/resume")).json()
    assert resumed["resumed_from"] == "memory"
    assert resumed["expires_at"][:16] == (server.installation.clock.now + timedelta(seconds=600)).isoformat()[:16]
    await check_nothing_is_left(server)


async def test_a_call_before_the_record_says_so_brings_it_back(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    await shut_down(server, sandbox)
    assert (await server.get("one"))["state"] == "running"
    await server.plane.reconciler._wakes.wake([sandbox])
    await until(lambda: sandbox not in server.installation.gateway.suspended)
    await server.plane.tasks.shared_ended()
    assert (await server.get("one"))["state"] == "running"
    assert server.installation.node.calls["resume"] == 1
    await check_nothing_is_left(server)


async def test_a_call_for_one_that_runs_changes_nothing(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    await server.plane.reconciler._wakes.wake([sandbox])
    await server.plane.tasks.shared_ended()
    assert (await server.get("one"))["state"] == "running"
    assert (server.installation.node.calls["resume"], server.installation.node.calls["pause"]) == (0, 0)
