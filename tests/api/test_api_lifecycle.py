"""Ends of a sandbox: asked for, by its time, by its death; and what a restart of the server makes of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import jwt
import pytest

from control_plane import Installation, Server, error_of
from cpuos.testing.waiting import until


async def started_create(server: Server, **body: Any) -> asyncio.Task[Any]:
    call = asyncio.create_task(server.create(**body))

    async def recorded() -> bool:
        return bool((await server.http.get("/v1/sandboxes")).json()["sandboxes"])

    await until(recorded)
    return call


def is_in(server: Server, ref: str, state: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return (await server.get(ref))["state"] == state

    return look


@pytest.mark.parametrize("where", ["create_gate", "answer_gate", "attach"])
async def test_kill_works_while_it_is_created(server: Server, where: str) -> None:
    node, gateway = server.installation.node, server.installation.gateway
    gate = gateway.attach_gate if where == "attach" else getattr(node, where)
    gate.clear()
    call = await started_create(server, name="one")
    kill = asyncio.create_task(server.kill("one"))
    await until(is_in(server, "one", "stopped" if where == "attach" else "stopping"))
    if where != "attach":  # the node's create ends when the node answers; waiting for the agent ends at once
        gate.set()
    killed, created = await asyncio.gather(kill, call)
    assert killed.status_code == 200, killed.text
    assert killed.json()["state"] == "stopped"
    assert created.status_code in (409, 410)
    assert error_of(created)["code"] in ("sandbox_stopped", "sandbox_lost", "stale_generation")
    assert node.sandboxes == {}
    assert (await server.http.get("/v1/capacity")).json()["sandboxes"]["reserved"] == 0
    await server.settle()
    assert (await server.get("one"))["state"] == "stopped"


async def test_kills_at_the_same_time_agree(server: Server) -> None:
    sandbox = (await server.created())["id"]
    answers = await asyncio.gather(*(server.kill(sandbox) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["state"] for answer in answers} == {"stopped"}
    assert server.installation.gateway.ended == {sandbox: "stopped"}


async def test_a_kill_that_cannot_reach_the_node_is_finished_later(server: Server) -> None:
    sandbox = (await server.created())["id"]
    server.installation.node.reachable = False
    answer = await server.kill(sandbox)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "node_unavailable")
    assert (await server.get(sandbox))["state"] == "stopping"
    server.installation.node.reachable = True
    await server.settle()
    assert (await server.get(sandbox))["state"] == "stopped"
    assert server.installation.node.sandboxes == {}


async def test_a_kill_is_finished_after_a_restart(installation: Installation) -> None:
    async with installation.serve() as server:
        sandbox = (await server.created())["id"]
        installation.node.reachable = False
        await server.kill(sandbox)
    installation.node.reachable = True
    async with installation.serve() as server:
        await server.settle()
        assert (await server.get(sandbox))["state"] == "stopped"


async def test_time_ends_it_and_more_time_does_not(server: Server) -> None:
    clock = server.installation.clock
    ends = await server.created(timeout_s=900)
    stays = await server.created(timeout_s=900)
    clock.advance(600)
    answer = await server.http.patch(f"/v1/sandboxes/{stays['id']}", json={"timeout_s": 3600, "labels": {"a": "b"}})
    assert (answer.json()["timeout_s"], answer.json()["labels"]) == (3600, {"a": "b"})
    await server.settle()
    assert (await server.get(ends["id"]))["state"] == "running"
    clock.advance(301)
    await server.settle()
    ended = await server.get(ends["id"])
    assert (ended["state"], ended["reason"]) == ("stopped", "its time of 15m ended")
    assert (await server.get(stays["id"]))["state"] == "running"
    assert server.installation.gateway.ended == {ends["id"]: "stopped"}
    entries = (await server.http.get("/v1/audit", params={"sandbox": ends["id"]})).json()["entries"]
    assert (entries[-1]["actor"], entries[-1]["action"]) == ("system", "sandbox.expire")


async def test_a_death_is_told_at_once(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the node's news: no look that comes round says it, nor a question that lasts until its time is over."""
    for pause in ("TICK_S", "SWEEP_S", "CHANGES_WAIT_S"):
        monkeypatch.setattr(f"cpuos.server.reconciler.{pause}", 3600)
    async with installation.serve(reconcile=True) as server:
        sandbox = (await server.created())["id"]
        await installation.node.die(sandbox)
        await until(is_in(server, sandbox, "lost"))
        record = await server.get(sandbox)
        assert (record["state"], record["reason"]) == ("lost", "killed by the kernel: out of memory")
        assert record["ended_at"]
        await server.plane.tasks.shared_ended()
        assert installation.gateway.ended == {sandbox: "lost"}
        assert installation.node.sandboxes == {}


async def test_a_death_while_it_starts_fails_the_create(installation: Installation) -> None:
    async with installation.serve(reconcile=True) as server:
        installation.gateway.attach_gate.clear()
        call = await started_create(server, name="one")

        async def made() -> bool:
            return bool(installation.node.sandboxes)

        await until(made)
        await installation.node.die(next(iter(installation.node.sandboxes)), "exit status 1")
        answer = await call
        assert (answer.status_code, error_of(answer)["code"]) == (410, "sandbox_lost")
        assert "exit status 1" in error_of(answer)["why"]
        assert (await server.get("one"))["state"] == "failed"
        assert installation.node.sandboxes == {}


async def test_silence_of_the_node_is_no_death(server: Server) -> None:
    sandbox = (await server.created())["id"]
    server.installation.node.reachable = False
    for _ in range(3):
        server.installation.clock.advance(30)
        await server.settle()
    assert (await server.get(sandbox))["state"] == "running"


async def test_what_the_node_has_no_more_is_lost(server: Server) -> None:
    sandbox = (await server.created())["id"]
    server.installation.node.sandboxes.clear()
    await server.settle()
    record = await server.get(sandbox)
    assert (record["state"], record["reason"]) == ("lost", "the node has it no more")


async def test_what_nobody_owns_is_removed_after_a_grace(server: Server) -> None:
    node, clock = server.installation.node, server.installation.clock
    sandbox = (await server.created())["id"]
    node.sandboxes["z" * 20] = node.sandboxes[sandbox].model_copy(update={"id": "z" * 20})
    await server.settle()
    assert len(node.sandboxes) == 2
    clock.advance(31)
    await server.settle()
    assert list(node.sandboxes) == [sandbox]


async def test_a_gateway_that_was_away_is_told_later(server: Server) -> None:
    sandbox = (await server.created())["id"]
    server.installation.gateway.reachable = False
    assert (await server.kill(sandbox)).status_code == 200
    server.installation.gateway.reachable = True
    await server.settle()
    assert server.installation.gateway.ended == {sandbox: "stopped"}


async def test_the_record_is_readable_until_it_is_forgotten_after_a_day(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await server.kill(sandbox)
    await server.settle()
    assert server.installation.gateway.forgotten == set()
    access = await server.http.post(f"/v1/sandboxes/{sandbox}/access")
    assert access.status_code == 200, access.text
    claims = jwt.decode(access.json()["ticket"], options={"verify_signature": False})
    assert (claims["scope"], claims["sbx"]) == (["records"], sandbox)
    assert (await server.http.post(f"/v1/sandboxes/{sandbox}/links", json={"path": "/x"})).status_code == 410
    server.installation.clock.advance(86401)
    await server.settle()
    assert server.installation.gateway.forgotten == {sandbox}
    error = error_of(await server.http.post(f"/v1/sandboxes/{sandbox}/access"))
    assert (error["code"], "record_retention_s" in error["why"]) == ("output_lost", True)


async def test_list_filters(server: Server) -> None:
    first = await server.created(name="one", labels={"team": "data", "env": "a:b"})
    second = await server.created(name="two", labels={"team": "data"})
    await server.kill("two")

    async def ids(**query: Any) -> list[str]:
        answer = await server.http.get("/v1/sandboxes", params=query)
        return [sandbox["id"] for sandbox in answer.json()["sandboxes"]]

    assert await ids() == await ids(state="all") == [second["id"], first["id"]]
    assert await ids(state="live") == [first["id"]]
    assert await ids(state="stopped") == [second["id"]]
    assert await ids(state=["running", "stopped"]) == [second["id"], first["id"]]
    assert await ids(state="all", name="two") == [second["id"]]
    assert await ids(state="all", label="team:data") == [second["id"], first["id"]]
    assert await ids(state="all", label=["team:data", "env:a:b"]) == [first["id"]]
    assert await ids(label="team:other") == []
    assert await ids(label="team:data", state="live") == [first["id"]]
    assert await ids(state="all", limit=1) == [second["id"]]


async def test_a_link(server: Server) -> None:
    await server.created(name="one")
    answer = await server.http.post("/v1/sandboxes/one/links", json={"path": "out/chart.png", "expires_s": 60})
    assert answer.status_code == 201
    assert answer.json()["url"].startswith("http://127.0.0.1:7071/v1/links/")
