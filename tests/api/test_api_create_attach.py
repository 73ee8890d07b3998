"""A create has the gateway wait for the agent while the node still makes the sandbox; both are undone together."""

from __future__ import annotations

import asyncio

from control_plane import Server, error_of
from cpuos.errors import AgentFailure, PlatformError
from cpuos.testing.waiting import until


async def test_both_go_on_at_the_same_time(server: Server) -> None:
    node, gateway = server.installation.node, server.installation.gateway
    node.create_gate.clear()
    call = asyncio.create_task(server.create(name="one"))

    async def attached() -> bool:
        return bool(gateway.attached)

    await until(attached)
    sandbox = await server.get("one")
    assert sandbox["state"] == "creating", "the node has not made it"
    node.create_gate.set()
    assert (await call).status_code == 201
    assert (await server.get("one"))["state"] == "running"


async def test_a_node_that_fails_calls_the_gateway_off(server: Server) -> None:
    node, gateway = server.installation.node, server.installation.gateway
    gateway.attach_gate.clear()
    node.create_error = PlatformError("cannot create sandbox: no room on the volume")
    answer = await server.create(name="one")
    assert (answer.status_code, error_of(answer)["what"]) == (500, "cannot create sandbox: no room on the volume")
    failed = await server.get("one")
    assert failed["state"] == "failed"
    assert gateway.attached == {}
    assert gateway.forgotten == {failed["id"]}


async def test_an_early_failure_of_the_gateway_ends_the_create(server: Server) -> None:
    node, gateway = server.installation.node, server.installation.gateway
    gateway.attach_error = AgentFailure("cannot reach the agent", code="agent_unresponsive")
    node.create_gate.clear()
    call = asyncio.create_task(server.create(name="one"))

    async def asked() -> bool:
        return node.calls["create"] > 0

    await until(asked)
    node.create_gate.set()
    answer = await call
    assert error_of(answer)["code"] == "agent_unresponsive"
    assert node.sandboxes == {}
