"""Pause and resume: what each leaves when a part fails, who may ask, and what of time and room they change."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from control_plane import Installation, Server, check_nothing_is_left, error_of
from cpuos.errors import AgentFailure, Conflict, PlatformError, SandboxGone, Unavailable
from cpuos.server.gateway import Listener, Suspended
from cpuos.testing.waiting import until
from cpuos.types.node import Restored

FREEZE_FAILED = Conflict("cannot freeze", "a process would not stop", code="freeze_failed")
NO_DISK = PlatformError("cannot pause", "the volume is full", code="disk_full")
DAMAGED = PlatformError("cannot resume", "its memory is not what was saved", code="snapshot_damaged")
SILENT = AgentFailure("cannot reach the agent", "no answer", code="agent_unresponsive")
AWAY = Unavailable("cannot reach it", "it is down", code="node_unavailable")


async def pause(server: Server, ref: str = "one") -> httpx2.Response:
    return await server.http.post(f"/v1/sandboxes/{ref}/pause")


async def resume(server: Server, ref: str = "one") -> httpx2.Response:
    return await server.http.post(f"/v1/sandboxes/{ref}/resume")


async def reserved(server: Server) -> dict[str, float]:
    answer = (await server.http.get("/v1/capacity")).json()
    return {name: amount["reserved"] for name, amount in answer.items()}


async def test_a_paused_sandbox_holds_its_disk_alone(server: Server) -> None:
    made = await server.created(name="one", cpu=2, memory_mib=1024, disk_mib=2048)
    before = await reserved(server)
    answer = await pause(server)
    assert answer.status_code == 200, answer.text
    paused = answer.json()
    assert (paused["state"], paused["generation"], paused["reason"]) == ("paused", made["generation"], "")
    assert (paused["expires_at"], paused["ended_at"]) == (None, None)
    assert paused["paused_at"]
    assert await reserved(server) == {"sandboxes": 0, "cpu": 0, "memory_mib": 0, "disk_mib": 2048}
    await check_nothing_is_left(server)
    running = (await resume(server)).json()
    assert (running["state"], running["paused_at"], running["left_s"]) == ("running", None, None)
    assert await reserved(server) == before
    await check_nothing_is_left(server)


async def test_both_verbs_are_idempotent_and_callers_share_the_work(server: Server) -> None:
    await server.created(name="one")
    node = server.installation.node
    answers = await asyncio.gather(*(pause(server) for _ in range(5)))
    assert {(one.status_code, one.json()["state"]) for one in answers} == {(200, "paused")}
    answers = await asyncio.gather(*(resume(server) for _ in range(5)))
    assert {(one.status_code, one.json()["state"]) for one in answers} == {(200, "running")}
    assert (await resume(server)).json()["state"] == "running"
    assert (node.calls["pause"], node.calls["resume"], node.calls["settle"]) == (1, 1, 1)


async def test_time_stands_still_while_it_is_paused(server: Server) -> None:
    clock = server.installation.clock
    await server.created(name="one", timeout_s=900)
    clock.advance(300)
    paused = (await pause(server)).json()
    assert paused["left_s"] == pytest.approx(600, abs=1)
    clock.advance(86400)
    await server.settle()
    assert (await server.get("one"))["state"] == "paused"
    await resume(server)
    clock.advance(590)
    await server.settle()
    assert (await server.get("one"))["state"] == "running"
    clock.advance(20)
    await server.settle()
    assert (await server.get("one"))["state"] == "stopped"


async def test_more_time_for_a_paused_one(server: Server) -> None:
    await server.created(name="one", timeout_s=900)
    await pause(server)
    changed = (await server.http.patch("/v1/sandboxes/one", json={"timeout_s": 60})).json()
    assert (changed["left_s"], changed["expires_at"]) == (60, None)
    await resume(server)
    server.installation.clock.advance(61)
    await server.settle()
    assert (await server.get("one"))["state"] == "stopped"


async def test_its_time_can_pause_it(server: Server) -> None:
    await server.created(name="one", timeout_s=60, on_timeout="pause")
    server.installation.clock.advance(61)
    await server.settle()
    paused = await server.get("one")
    assert (paused["state"], paused["reason"], paused["left_s"]) == ("paused", "its time of 1m ended", 60)
    assert (await resume(server)).json()["reason"] == ""
    entries = (await server.http.get("/v1/audit", params={"sandbox": "one"})).json()["entries"]
    told = [(one["actor"], one["detail"]) for one in entries if one["action"] == "sandbox.pause"]
    assert told == [("system", {"reason": "its time of 1m ended"})]


async def test_one_that_will_not_be_paused_at_its_end_is_killed(server: Server) -> None:
    """Else a guest that no signal stops would live for ever."""
    server.installation.gateway.suspend_error = FREEZE_FAILED
    await server.created(name="one", timeout_s=60, on_timeout="pause")
    server.installation.clock.advance(61)
    await server.settle()
    assert (await server.get("one"))["state"] == "running"
    server.installation.clock.advance(61)
    await server.settle()
    ended = await server.get("one")
    assert (ended["state"], "could not be paused" in ended["reason"]) == ("stopped", True)
    await check_nothing_is_left(server)


@pytest.mark.parametrize("error", [FREEZE_FAILED, SILENT], ids=lambda error: error.code)
async def test_a_freeze_that_fails_leaves_it_running(server: Server, error: Any) -> None:
    await server.created(name="one")
    server.installation.gateway.suspend_error = error
    answer = await pause(server)
    assert (answer.status_code, error_of(answer)["code"]) == (error.status, error.code)
    assert (await server.get("one"))["state"] == "running"
    assert server.installation.node.calls["pause"] == 0
    await check_nothing_is_left(server)


async def test_a_node_that_cannot_pause_leaves_it_running_and_thawed(server: Server) -> None:
    await server.created(name="one")
    server.installation.node.errors["pause"] = NO_DISK
    answer = await pause(server)
    assert error_of(answer)["code"] == "disk_full"
    assert error_of(answer)["what"].endswith("it runs on")
    assert (await server.get("one"))["state"] == "running"
    await check_nothing_is_left(server)


async def test_a_resume_that_fails_leaves_it_paused_with_the_reason(server: Server) -> None:
    await server.created(name="one")
    await pause(server)
    server.installation.node.errors["resume"] = DAMAGED
    answer = await resume(server)
    assert (answer.status_code, error_of(answer)["code"]) == (500, "snapshot_damaged")
    assert error_of(answer)["what"].endswith("it stays paused")
    paused = await server.get("one")
    assert (paused["state"], "not what was saved" in paused["reason"]) == ("paused", True)
    await check_nothing_is_left(server)
    del server.installation.node.errors["resume"]
    assert (await resume(server)).json()["state"] == "running"


@pytest.mark.parametrize(
    ("restored", "lacking"),
    [("root", "its processes"), ("workspace", "its processes and the files outside of /workspace"), ("memory", "")],
)
async def test_what_did_not_come_back_is_said(server: Server, restored: str, lacking: str) -> None:
    await server.created(name="one")
    snap = (await server.http.post("/v1/sandboxes/one/snapshots", json={})).json()["id"]
    await pause(server)
    server.installation.node.restores = Restored(restored)
    resumed = (await resume(server)).json()
    assert (resumed["state"], resumed["reason"]) == ("running", f"resumed without {lacking}" if lacking else "")
    assert (await server.created(snapshot=snap))["reason"] == (f"began without {lacking}" if lacking else "")


async def test_an_agent_that_does_not_come_back_is_paused_again(server: Server) -> None:
    await server.created(name="one")
    await pause(server)
    node, gateway = server.installation.node, server.installation.gateway
    gateway.attach_error = SILENT
    answer = await resume(server)
    assert error_of(answer)["code"] == "agent_unresponsive"
    assert (node.calls["repause"], node.calls["settle"]) == (1, 0)
    assert (await server.get("one"))["state"] == "paused"
    await check_nothing_is_left(server)
    gateway.attach_error = None
    assert (await resume(server)).json()["state"] == "running"


async def test_a_gateway_that_goes_away_in_the_middle_is_waited_for(server: Server) -> None:
    """Whether the guest goes on is not known: going back to what was saved could lose what it has done since."""
    await server.created(name="one")
    await pause(server)
    server.installation.gateway.attach_error = Unavailable("cannot reach it", "gone", code="gateway_unavailable")
    assert (await resume(server)).status_code == 503
    assert (await server.get("one"))["state"] == "resuming"
    assert server.installation.node.calls["repause"] == 0
    server.installation.gateway.attach_error = None
    await server.settle()
    assert (await server.get("one"))["state"] == "running"
    await check_nothing_is_left(server)


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_a_node_that_goes_away_leaves_nothing_undecided(server: Server, verb: str) -> None:
    await server.created(name="one")
    if verb == "resume":
        await pause(server)
    node = server.installation.node
    node.gates[verb].close()
    call = asyncio.create_task(pause(server) if verb == "pause" else resume(server))
    await until(lambda: node.gates[verb].waiting)
    node.errors[verb] = AWAY
    node.reachable = False
    node.gates[verb].open()
    assert (await call).status_code == 503
    assert (await server.get("one"))["state"] == f"{verb.removesuffix('e')}ing"
    node.reachable = True
    await server.settle()
    assert (await server.get("one"))["state"] == ("running" if verb == "pause" else "paused")
    await check_nothing_is_left(server)


async def test_a_resume_needs_room(server: Server) -> None:
    server.installation.node.capacity |= {"memory_mib": 2048}
    await server.created(name="one", memory_mib=2048)
    await pause(server)
    other = await server.created(memory_mib=2048)
    answer = await resume(server)
    assert (answer.status_code, error_of(answer)["code"]) == (429, "capacity_exceeded")
    assert (await server.get("one"))["state"] == "paused"
    await server.kill(other["id"])
    assert (await resume(server)).json()["state"] == "running"


@pytest.mark.parametrize("where", ["suspend", "pause", "resume", "attach", "settle"])
async def test_kill_works_in_the_middle(server: Server, where: str) -> None:
    await server.created(name="one")
    node, gateway = server.installation.node, server.installation.gateway
    if where in ("resume", "attach", "settle"):
        await pause(server)
    gate: Any = {"suspend": gateway.suspend_gate, "attach": gateway.attach_gate}.get(where) or node.gates[where]
    gate.clear() if where == "attach" else gate.close()
    verb = pause if where in ("suspend", "pause") else resume
    call = asyncio.create_task(verb(server))

    async def begun() -> bool:
        return (await server.get("one"))["state"] in ("pausing", "resuming")

    await until(begun)
    killed = await server.kill("one")
    assert killed.json()["state"] == "stopped", killed.text
    gate.set() if where == "attach" else gate.open()
    answer = await call
    assert answer.status_code in (404, 409, 410)
    await server.settle()
    assert (await server.get("one"))["state"] == "stopped"
    await check_nothing_is_left(server)


async def test_kill_from_paused(server: Server) -> None:
    await server.created(name="one")
    await pause(server)
    assert (await server.kill("one")).json()["state"] == "stopped"
    await check_nothing_is_left(server)
    assert (await resume(server)).status_code == 410


async def test_a_death_while_it_pauses_is_told(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    node = server.installation.node
    node.gates["pause"].close()
    call = asyncio.create_task(pause(server))
    await until(lambda: node.gates["pause"].waiting)
    await node.die(sandbox)
    node.gates["pause"].open()
    answer = await call
    assert (answer.status_code, error_of(answer)["code"]) == (410, "sandbox_lost")
    assert (await server.get("one"))["reason"] == "killed by the kernel: out of memory"
    await check_nothing_is_left(server)


async def test_a_pause_image_that_is_gone_is_a_loss(server: Server) -> None:
    await server.created(name="one")
    await pause(server)
    server.installation.node.sandboxes.clear()
    answer = await resume(server)
    assert (answer.status_code, error_of(answer)["code"]) == (410, "sandbox_lost")
    assert (await server.get("one"))["state"] == "lost"
    await check_nothing_is_left(server)


async def test_a_node_that_pauses_by_itself_is_believed(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    node = server.installation.node
    node._set(node.sandboxes[sandbox], paused=True, pause_reason="the node was shut down")
    await server.settle()
    paused = await server.get("one")
    assert (paused["state"], paused["reason"]) == ("paused", "the node was shut down")


async def test_policies_changed_meanwhile_hold_before_it_goes_on(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    await pause(server)
    node = server.installation.node
    answer = await server.http.put("/v1/sandboxes/one/network", json={"mode": "off"})
    assert answer.status_code == 200, answer.text
    assert node.policies[sandbox].layers[-1].policy.mode == "internet"
    assert node.calls["update_network"] == 0
    await resume(server)
    assert node.policies[sandbox].layers[-1].policy.mode == "off"


async def test_verbs_that_need_another_state_say_so(server: Server) -> None:
    await server.created(name="one")
    await server.kill("one")
    for verb in (pause, resume):
        answer = await verb(server)
        assert (answer.status_code, error_of(answer)["code"]) == (410, "sandbox_stopped")


async def test_tickets_and_ports_work_while_it_is_paused(server: Server) -> None:
    await server.created(name="one")
    await server.http.post("/v1/sandboxes/one/ports", json={"port": 3000})
    await pause(server)
    assert (await server.http.post("/v1/sandboxes/one/access")).status_code == 200
    assert (await server.http.post("/v1/sandboxes/one/links", json={"path": "a"})).status_code == 201
    assert [one["port"] for one in (await server.http.get("/v1/sandboxes/one/ports")).json()["ports"]] == [3000]


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_a_server_that_ends_in_the_middle(installation: Installation, verb: str) -> None:
    node = installation.node
    async with installation.serve(stop_grace_s=0) as server:
        await server.created(name="one")
        if verb == "resume":
            await pause(server)
        node.gates[verb].close()
        call = asyncio.create_task(pause(server) if verb == "pause" else resume(server))
        await until(lambda: node.gates[verb].waiting)
        call.cancel()
    node.gates[verb].open()
    async with installation.serve() as server:
        assert (await server.get("one"))["state"] == f"{verb.removesuffix('e')}ing"
        await server.settle()
        await check_nothing_is_left(server)
        assert (await server.get("one"))["state"] == ("running" if verb == "pause" else "paused")


async def test_what_a_resume_did_not_bring_back_is_said(server: Server) -> None:
    node, gateway = server.installation.node, server.installation.gateway
    sandbox = (await server.created(name="one"))["id"]
    gateway.told[sandbox] = Suspended(processes=3, listeners=[Listener(port=8000, address="0.0.0.0")], commands=["c1"])
    assert (await pause(server)).status_code == 200
    made = (await resume(server)).json()
    assert (made["resumed_from"], made["restore_incomplete"], made["reason"]) == ("memory", [], "")
    await pause(server)
    node.restores = Restored.ROOT
    made = (await resume(server)).json()
    missing = ["3 processes", "command c1", "listener on 0.0.0.0:8000"]
    assert (made["resumed_from"], made["restore_incomplete"]) == ("files", missing)
    assert made["reason"] == "resumed without its processes"
    entries = (await server.http.get(f"/v1/audit?sandbox={sandbox}")).json()["entries"]
    (noted,) = [one for one in entries if one["action"] == "sandbox.restore_incomplete"]
    assert noted["detail"] == {"reason": "resumed without its processes", "missing": missing}
    await check_nothing_is_left(server)


async def test_a_resume_after_a_pause_that_nobody_wrote_down_says_what_it_can(installation: Installation) -> None:
    """The server was ended when the node had paused it and the record did not say so yet."""
    node = installation.node
    async with installation.serve(stop_grace_s=0) as server:
        sandbox = (await server.created(name="one"))["id"]
        node.gates["pause"].close()
        call = asyncio.create_task(pause(server))
        await until(lambda: node.gates["pause"].waiting)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    node.gates["pause"].open()
    node._set(node.sandboxes[sandbox], paused=True)
    node.restores = Restored.ROOT
    async with installation.serve() as server:
        await server.settle()
        assert (await server.get("one"))["state"] == "paused"
        assert (await resume(server)).json()["restore_incomplete"] == ["all processes"]


async def test_one_that_is_killed_as_it_is_resumed_says_so(server: Server) -> None:
    node, gateway = server.installation.node, server.installation.gateway
    made = await server.created()
    assert (await pause(server, made["id"])).status_code == 200
    gateway.attach_gate.clear()
    resuming = asyncio.create_task(server.http.post(f"/v1/sandboxes/{made['id']}/resume"))
    await until(lambda: node.sandboxes[made["id"]].paused is False)
    assert (await server.http.delete(f"/v1/sandboxes/{made['id']}")).status_code < 300
    gateway.attach_error = SandboxGone("cannot attach sandbox: it was ended meanwhile")
    gateway.attach_gate.set()
    answer = await resuming
    assert (answer.status_code, error_of(answer)["code"]) == (410, "sandbox_stopped")
    assert (await server.get(made["id"]))["state"] == "stopped"
