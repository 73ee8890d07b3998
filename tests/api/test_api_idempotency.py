"""Idempotency keys: one piece of work for one key, whatever repeats, races and restarts."""

from __future__ import annotations

import asyncio

import pytest

from control_plane import Installation, Server, error_of
from cpuos.errors import AgentFailure


async def test_a_repeat_gets_the_first_answer(server: Server) -> None:
    first = await server.create(key="order-1", name="one", labels={"a": "1"})
    again = await server.create(key="order-1", labels={"a": "1"}, name="one")
    assert (again.status_code, again.json()["sandbox"]) == (201, first.json()["sandbox"])
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert again.json()["access"]["ticket"] != first.json()["access"]["ticket"]
    assert len(server.installation.node.sandboxes) == 1


async def test_the_ticket_is_not_stored(server: Server) -> None:
    first = await server.create(key="order-1")
    kept = b"".join(path.read_bytes() for path in server.installation.folder.glob("cpuos.db*"))
    assert first.json()["access"]["ticket"].encode() not in kept


async def test_another_body_is_refused(server: Server) -> None:
    await server.create(key="order-1", cpu=1)
    answer = await server.create(key="order-1", cpu=2)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "idempotency_mismatch")
    assert len(server.installation.node.sandboxes) == 1


async def test_repeats_at_the_same_time_share_one_create(server: Server) -> None:
    server.installation.node.create_gate.clear()
    calls = [asyncio.create_task(server.create(key="order-1")) for _ in range(10)]
    await server.node_called()
    other = await server.create(key="order-1", cpu=7)
    assert error_of(other)["code"] == "idempotency_mismatch"
    server.installation.node.create_gate.set()
    answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["sandbox"]["id"] for answer in answers}) == 1
    assert server.installation.node.calls["create"] == 1


async def test_a_repeat_does_not_wait_for_ever(installation: Installation) -> None:
    async with installation.serve(idempotency_wait_s=0.2) as server:
        installation.node.create_gate.clear()
        first = asyncio.create_task(server.create(key="order-1"))
        await server.node_called()
        answer = await server.create(key="order-1")
        assert (answer.status_code, error_of(answer)["code"]) == (409, "idempotency_in_progress")
        installation.node.create_gate.set()
        assert (await first).status_code == 201


async def test_a_refusal_leaves_the_key_free(server: Server) -> None:
    await server.created(name="one")
    assert error_of(await server.create(key="order-1", name="one"))["code"] == "name_taken"
    assert error_of(await server.create(key="order-2", template="ruby"))["code"] == "template_not_found"
    assert error_of(await server.create(key="order-3", cpu="x"))["code"] == "invalid_request"
    await server.kill("one")
    assert (await server.create(key="order-1", name="one")).status_code == 201
    assert (await server.create(key="order-2", template="base")).status_code == 201
    assert (await server.create(key="order-3", cpu=1)).status_code == 201


async def test_a_create_that_failed_half_way_keeps_its_answer(server: Server) -> None:
    server.installation.gateway.attach_error = AgentFailure("cannot reach the agent", code="agent_unresponsive")
    first = await server.create(key="order-1")
    server.installation.gateway.attach_error = None
    again = await server.create(key="order-1")
    assert first.status_code == again.status_code == 504
    assert first.json() == again.json()
    assert (await server.create(key="order-2")).status_code == 201


async def test_keys_are_checked_and_scoped(server: Server) -> None:
    assert error_of(await server.create(key="x" * 256))["code"] == "invalid_request"
    sandbox = (await server.create(key="k")).json()["sandbox"]["id"]
    answer = await server.http.post(f"/v1/sandboxes/{sandbox}/access", headers={"idempotency-key": "k"})
    assert answer.status_code == 200


@pytest.mark.parametrize("verb", ["fork", "snapshots"])
async def test_a_key_is_bound_to_what_it_was_sent_to(server: Server, verb: str) -> None:
    """Who asked for a copy of one sandbox never gets those of another."""
    one, two = [(await server.created())["id"] for _ in range(2)]
    headers = {"idempotency-key": "k"}
    first = await server.http.post(f"/v1/sandboxes/{one}/{verb}", json={}, headers=headers)
    other = await server.http.post(f"/v1/sandboxes/{two}/{verb}", json={}, headers=headers)
    again = await server.http.post(f"/v1/sandboxes/{one}/{verb}", json={}, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.headers["idempotency-replayed"] == "true"
    assert (other.status_code, error_of(other)["code"]) == (409, "idempotency_mismatch")


async def test_a_client_that_goes_away_leaves_nothing_half_made(server: Server) -> None:
    server.installation.node.create_gate.clear()
    call = asyncio.create_task(server.create(key="order-1", name="one"))
    await server.node_called()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    server.installation.node.create_gate.set()
    again = await server.create(key="order-1", name="one")
    assert again.status_code == 201
    assert (await server.get("one"))["state"] == "running"
    assert len(server.installation.node.sandboxes) == 1
    entries = (await server.http.get("/v1/audit", params={"action": "sandbox.create"})).json()["entries"]
    assert [entry["result"] for entry in entries] == [None, "ok"]


async def died_in_create(installation: Installation, *, before_node: bool) -> None:
    """A server that is killed while it creates: its task goes no further, its database stays as it was."""
    gate = installation.node.create_gate if before_node else installation.node.answer_gate
    gate.clear()
    async with installation.serve(stop_grace_s=0) as server:
        call = asyncio.create_task(server.create(key="order-1", name="one"))
        await server.node_called(answering=not before_node)
        assert not call.done()
    await asyncio.gather(call, return_exceptions=True)
    gate.set()


async def test_a_restart_finishes_what_the_node_has_made(installation: Installation) -> None:
    await died_in_create(installation, before_node=False)
    async with installation.serve() as server:
        repeat = asyncio.create_task(server.create(key="order-1", name="one"))
        await asyncio.sleep(0.1)
        assert not repeat.done()
        await server.settle()
        answer = await repeat
        assert answer.status_code == 201, answer.text
        assert answer.json()["sandbox"]["state"] == "running"
        assert list(installation.node.sandboxes) == [answer.json()["sandbox"]["id"]]
        assert installation.gateway.attached
        entries = (await server.http.get("/v1/audit", params={"action": "sandbox.create"})).json()["entries"]
        assert [entry["result"] for entry in entries] == [None, "ok"]
        assert (await server.http.get("/v1/capacity")).json()["sandboxes"]["reserved"] == 1


async def test_a_restart_fails_what_the_node_has_not_made(installation: Installation) -> None:
    await died_in_create(installation, before_node=True)
    async with installation.serve() as server:
        assert (await server.get("one"))["state"] == "creating"
        await server.settle()
        record = await server.get("one")
        assert record["state"] == "failed"
        assert "the server was restarted" in record["reason"]
        answers = [await server.create(key="order-1", name="one") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert error_of(answers[0])["code"] == "node_unavailable"
        assert installation.node.sandboxes == {}
        assert (await server.http.get("/v1/capacity")).json()["sandboxes"]["reserved"] == 0
        entries = (await server.http.get("/v1/audit", params={"action": "sandbox.create"})).json()["entries"]
        assert [entry["result"] for entry in entries] == [None, "error"]


async def test_a_restart_frees_the_key_of_a_call_that_did_nothing(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with installation.serve(stop_grace_s=0) as server:
        begun = asyncio.Event()

        async def create(*_: object, **__: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(server.plane.lifecycle, "create", create)
        call = asyncio.create_task(server.create(key="order-1"))
        await begun.wait()
    await asyncio.gather(call, return_exceptions=True)
    async with installation.serve() as server:
        await server.settle()
        assert (await server.create(key="order-1")).status_code == 201
        entries = (await server.http.get("/v1/audit", params={"action": "sandbox.create"})).json()["entries"]
    assert [entry["result"] for entry in entries] == [None, "unknown", None, "ok"]


async def test_a_key_is_free_again_after_a_day(server: Server) -> None:
    first = await server.create(key="order-1")
    server.installation.clock.advance(23 * 3600)
    await server.settle()
    assert (await server.create(key="order-1")).json()["sandbox"] == first.json()["sandbox"]
    server.installation.clock.advance(2 * 3600)
    await server.settle()
    assert (await server.create(key="order-1")).json()["sandbox"]["id"] != first.json()["sandbox"]["id"]
