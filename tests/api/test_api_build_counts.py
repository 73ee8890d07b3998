"""A workspace's builds at once are counted for calls at once too."""

from __future__ import annotations

import asyncio
from typing import Any

from control_plane import Server, error_of
from cpuos.server.templates.room import MAX_BUILDS
from cpuos.testing.waiting import until


async def test_builds_that_begin_at_once_are_no_more_than_may_be(server: Server) -> None:
    node = server.installation.node
    node.create_gate.clear()

    async def build(number: int) -> Any:
        return await server.http.post("/v1/builds", json={"name": f"t{number}", "run": [f"echo {number}"]})

    calls = [asyncio.create_task(build(number)) for number in range(2 * MAX_BUILDS)]
    await until(lambda: node.calls["create"] + sum(call.done() for call in calls) == len(calls))
    begun = node.calls["create"]
    node.create_gate.set()
    answers = [await call for call in calls]
    assert begun == MAX_BUILDS
    refused = [answer for answer in answers if answer.status_code != 201]
    assert len(refused) == len(calls) - MAX_BUILDS
    assert {error_of(answer)["code"] for answer in refused} == {"limit_reached"}
    # None of them is counted for good.
    await until(lambda: not server.plane.builder._active and not server.plane.builder._begun)
