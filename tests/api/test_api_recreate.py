"""Recreate: a lost sandbox runs again under its id, or is lost as before with its files kept."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import httpx2
import pytest
from sqlalchemy import update

from control_plane import Installation, Server, check_nothing_is_left, error_of
from cpuos.errors import AgentFailure, CapacityExceeded, PlatformError, Unavailable
from cpuos.server.db.models import Workspace
from cpuos.testing.waiting import until
from cpuos.types.node import Restored
from cpuos.types.sandbox import HOST_RESTARTED

SILENT = AgentFailure("cannot reach the agent", "no answer", code="agent_unresponsive")


async def recreate(server: Server, ref: str = "one", *, key: str | None = None) -> httpx2.Response:
    headers = {"idempotency-key": key} if key else {}
    return await server.http.post(f"/v1/sandboxes/{ref}/recreate", headers=headers)


async def lost(server: Server, *, reason: str = "killed by the kernel: out of memory", **body: Any) -> str:
    sandbox = (await server.created(**({"name": "one"} | body)))["id"]
    await server.installation.node.die(sandbox, reason)
    await server.settle()
    assert (await server.get(sandbox))["state"] == "lost"
    return sandbox


async def kept(server: Server) -> list[str]:
    return [one["id"] for one in (await server.http.get("/v1/snapshots")).json()["snapshots"]]


async def test_it_runs_again_under_its_id_as_the_next_generation(server: Server) -> None:
    server.installation.node.restores = Restored.ROOT
    sandbox = await lost(server, labels={"a": "b"}, timeout_s=600)
    (snapshot,) = await kept(server)
    answer = await recreate(server)
    assert answer.status_code == 201, answer.text
    made, access = answer.json()["sandbox"], answer.json()["access"]
    assert (made["id"], made["name"], made["state"], made["generation"]) == (sandbox, "one", "running", 2)
    assert (made["labels"], made["reason"], made["ended_at"]) == ({"a": "b"}, "", None)
    assert access["ticket"]
    node, gateway = server.installation.node, server.installation.gateway
    assert node.begun_with[sandbox] == (snapshot, False)
    assert gateway.attached == {sandbox: 2}
    assert await kept(server) == []
    told = made["recreated"]
    assert (told["workspace"], told["root"]) == ("all", "saved")
    assert told["lost_reason"] == "killed by the kernel: out of memory"
    assert told["root_age_s"] >= 0
    await check_nothing_is_left(server)
    entries = (await server.http.get(f"/v1/audit?sandbox={sandbox}")).json()["entries"]
    (outcome,) = [one for one in entries if one["action"] == "sandbox.recreate" and one["phase"] == "outcome"]
    assert (outcome["result"], outcome["detail"]["generation"]) == ("ok", 2)
    assert outcome["detail"]["recreated"]["root"] == "saved"


async def test_what_did_not_come_back_is_said(server: Server) -> None:
    server.installation.node.restores = Restored.WORKSPACE
    await lost(server, reason=HOST_RESTARTED)
    made = (await recreate(server)).json()["sandbox"]
    told = made["recreated"]
    assert (told["workspace"], told["root"], told["root_at"], told["root_age_s"]) == ("synced", "template", None, None)
    assert made["reason"] == "recreated without the files outside of /workspace"


async def test_how_old_the_root_is_counts_to_the_loss(server: Server) -> None:
    node, clock = server.installation.node, server.installation.clock
    node.restores = Restored.ROOT
    sandbox = await lost(server)
    (snapshot,) = await kept(server)
    at = clock.now - timedelta(seconds=300)
    node.snapshots_kept[snapshot] = node.snapshots_kept[snapshot].model_copy(update={"created_at": at})
    clock.advance(3600)
    told = (await recreate(server, sandbox)).json()["sandbox"]["recreated"]
    assert told["root_age_s"] == pytest.approx(300, abs=1)


async def test_its_session_begins_anew(server: Server) -> None:
    await lost(server, timeout_s=600)
    server.installation.clock.advance(3000)
    assert (await recreate(server)).json()["sandbox"]["state"] == "running"
    server.installation.clock.advance(590)
    await server.settle()
    assert (await server.get("one"))["state"] == "running"
    server.installation.clock.advance(20)
    await server.settle()
    assert (await server.get("one"))["state"] == "stopped"


async def test_it_can_be_lost_and_made_anew_again(server: Server) -> None:
    sandbox = await lost(server)
    for generation in (2, 3):
        assert (await recreate(server)).json()["sandbox"]["generation"] == generation
        await server.installation.node.die(sandbox)
        await server.settle()
        assert len(await kept(server)) == 1
    assert (await recreate(server)).json()["sandbox"]["generation"] == 4
    await check_nothing_is_left(server)


async def test_files_that_are_gone_are_said_to_be(server: Server) -> None:
    await lost(server)
    server.installation.clock.advance(90000)
    await server.settle()
    answer = await recreate(server)
    assert (answer.status_code, error_of(answer)["code"]) == (410, "sandbox_lost")
    assert "kept for a day" in error_of(answer)["why"]
    assert (await server.get("one"))["state"] == "lost"


async def test_files_that_could_not_be_kept_are_said_to_be(server: Server) -> None:
    server.installation.node.errors["snapshot"] = CapacityExceeded("cannot save it", "no room")
    await lost(server)
    del server.installation.node.errors["snapshot"]
    answer = await recreate(server)
    assert (
        error_of(answer)["why"]
        == "its files are gone: nothing of them could be kept when it was lost, or too many were lost since"
    )


async def test_files_that_its_node_has_still_are_waited_for(server: Server) -> None:
    node = server.installation.node
    node.errors["snapshot"] = Unavailable("cannot reach it", "down", code="node_unavailable")
    await lost(server)
    answer = await recreate(server)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "node_unavailable")
    del node.errors["snapshot"]
    assert (await recreate(server)).json()["sandbox"]["state"] == "running"


@pytest.mark.parametrize("part", ["node", "agent"])
async def test_a_failure_leaves_it_lost_and_its_files_kept(server: Server, part: str) -> None:
    sandbox = await lost(server)
    before, snapshots = await server.get(sandbox), await kept(server)
    node, gateway = server.installation.node, server.installation.gateway
    if part == "node":
        node.create_error = PlatformError("cannot create sandbox", "a mount failed")
    else:
        gateway.attach_error = SILENT
    answer = await recreate(server)
    assert answer.status_code >= 500
    after = await server.get(sandbox)
    assert (after["state"], after["ended_at"], after["expires_at"] is None) == ("lost", before["ended_at"], False)
    assert after["reason"].startswith("killed by the kernel: out of memory; cannot ")
    assert sandbox not in gateway.forgotten
    await server.settle()
    assert await kept(server) == snapshots
    await check_nothing_is_left(server)
    node.create_error = gateway.attach_error = None
    made = (await recreate(server)).json()["sandbox"]
    assert (made["state"], made["generation"], made["reason"]) == ("running", 3, "")
    assert made["recreated"]["lost_reason"] == "killed by the kernel: out of memory"
    await check_nothing_is_left(server)


async def test_a_repeat_with_its_key_is_the_same(server: Server) -> None:
    await lost(server)
    first, second = await recreate(server, key="k"), await recreate(server, key="k")
    assert second.headers["idempotency-replayed"] == "true"
    assert first.json()["sandbox"] == second.json()["sandbox"]
    assert server.installation.node.calls["create"] == 2


async def test_callers_at_the_same_time_share_the_work(server: Server) -> None:
    await lost(server)
    answers = await asyncio.gather(*(recreate(server) for _ in range(5)))
    assert {(one.status_code, one.json()["sandbox"]["generation"]) for one in answers} == {(201, 2)}
    await check_nothing_is_left(server)


async def test_one_that_runs_stays_as_it_is_and_one_that_ended_is_gone(server: Server) -> None:
    await server.created(name="one")
    answer = await recreate(server)
    assert (answer.status_code, answer.json()["sandbox"]["generation"]) == (201, 1)
    assert answer.json()["sandbox"]["recreated"] is None
    await server.http.post("/v1/sandboxes/one/pause")
    assert error_of(await recreate(server))["code"] == "wrong_state"
    await server.kill("one")
    assert error_of(await recreate(server))["code"] == "sandbox_stopped"


async def test_its_name_may_be_anothers_by_now(server: Server) -> None:
    sandbox = await lost(server)
    await server.created(name="one")
    answer = await recreate(server, sandbox)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "name_taken")
    await server.settle()
    assert len(await kept(server)) == 1
    await check_nothing_is_left(server)
    await server.kill("one")
    assert (await recreate(server, sandbox)).status_code == 201


async def test_without_room_it_stays_lost(server: Server) -> None:
    sandbox = await lost(server, memory_mib=60000)
    await server.created(name="other", memory_mib=60000)
    answer = await recreate(server, sandbox)
    assert (answer.status_code, error_of(answer)["code"]) == (429, "capacity_exceeded")
    await check_nothing_is_left(server)


async def test_published_ports_are_closed(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    first = (await server.http.post("/v1/sandboxes/one/ports", json={"port": 3000, "public": True})).json()
    assert first["public"]
    await server.installation.node.die(sandbox)
    await server.settle()
    await recreate(server)
    assert (await server.http.get("/v1/sandboxes/one/ports")).json()["ports"] == []
    await server.http.post("/v1/sandboxes/one/ports", json={"port": 3000})
    told = server.installation.gateway.ports[sandbox, 3000]
    assert (told["generation"], told["epoch"], told["public"]) == (2, 2, False)


async def test_a_late_word_of_its_loss_does_not_end_it(server: Server) -> None:
    sandbox = await lost(server)
    await recreate(server)
    gateway = server.installation.gateway
    await gateway.detach(sandbox, reason="lost", text="late", generation=1)
    assert gateway.attached == {sandbox: 2}


# --- the server is ended meanwhile ---


@pytest.mark.parametrize("where", ["before the node", "before the answer", "before the agent"])
async def test_what_an_ended_server_left_is_ended_by_the_next(installation: Installation, where: str) -> None:
    node, gateway = installation.node, installation.gateway
    async with installation.serve(stop_grace_s=0) as server:
        sandbox = await lost(server)
        gates = {"before the node": node.create_gate, "before the answer": node.answer_gate}
        gate = gates.get(where, gateway.attach_gate)
        calls = node.calls["create"]
        gate.clear()
        call = asyncio.create_task(recreate(server, key="k"))
        await until(lambda: node.calls["create"] > calls)
        await until(lambda: where == "before the node" or sandbox in node.sandboxes)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.shield(call)
    gate.set()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with installation.serve() as server:
        assert (await server.get(sandbox))["state"] == "creating"
        await server.settle()
        await server.settle()
        told = await server.get(sandbox)
        if where == "before the node":
            assert (told["state"], told["generation"]) == ("lost", 2)
            assert len(await kept(server)) == 1
            answer = await recreate(server, key="k")
            assert (answer.status_code, error_of(answer)["code"]) == (503, "node_unavailable")
            assert (await recreate(server)).json()["sandbox"]["generation"] == 3
        else:
            assert (told["state"], told["generation"]) == ("running", 2)
            assert told["recreated"]["lost_reason"] == "killed by the kernel: out of memory"
            answer = await recreate(server, key="k")
            assert answer.headers["idempotency-replayed"] == "true"
            assert answer.json()["sandbox"]["generation"] == 2
            installation.clock.advance(90000)
            await server.kill(sandbox)
        await server.settle()
        await server.settle()
        assert await kept(server) == []
        await check_nothing_is_left(server)


async def test_it_is_killed_while_it_is_made_anew(server: Server) -> None:
    sandbox = await lost(server)
    server.installation.gateway.attach_gate.clear()
    call = asyncio.create_task(recreate(server))
    await until(lambda: sandbox in server.installation.node.sandboxes)
    assert (await server.kill(sandbox)).json()["state"] == "stopped"
    server.installation.gateway.attach_gate.set()
    assert (await call).status_code == 410
    await server.settle()
    server.installation.clock.advance(90000)
    await server.settle()
    await check_nothing_is_left(server)


async def test_losses_again_and_again_keep_no_more_than_a_workspace_may_have(server: Server) -> None:
    """A sandbox's root can end it when it likes: what is kept of each is as large as its disk."""
    async with server.plane.database.write() as connection:
        await connection.execute(update(Workspace).values(max_sandboxes=2))
    ids = [await lost(server, name=None) for _ in range(6)]
    await server.settle()
    assert len(await kept(server)) == 2
    assert set(server.installation.node.snapshots_kept) == set(await kept(server))
    assert [(await recreate(server, one)).status_code for one in ids] == [410] * 4 + [201] * 2


async def test_all_that_a_host_loses_at_once_can_be_made_anew(server: Server) -> None:
    async with server.plane.database.write() as connection:
        await connection.execute(update(Workspace).values(max_sandboxes=3))
    ids = [(await server.created())["id"] for _ in range(3)]
    for one in ids:
        await server.installation.node.die(one, HOST_RESTARTED)
    for _ in range(3):
        await server.settle()
    assert [(await recreate(server, one)).status_code for one in ids] == [201] * 3
