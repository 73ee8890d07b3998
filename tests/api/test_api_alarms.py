"""Alarms of usage: told once a stretch, acted on by the strictest rule, and loosened by nobody who may not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import insert

from control_plane import Installation, Server, check_nothing_is_left
from cpuos.errors import AgentFailure, Conflict, Unavailable
from cpuos.server.auth import Permission, create_key
from cpuos.server.db.models import Workspace
from cpuos.types.alarms import AlarmRule
from cpuos.types.node import Usage

STEP_S = 10.0


def rule(text: str) -> AlarmRule:
    return AlarmRule.model_validate(text)


@pytest.fixture
async def server(installation: Installation) -> AsyncIterator[Server]:
    async with installation.serve(alarms=(rule("cpu=90%/10m"),)) as running:
        yield running


async def look(server: Server) -> None:
    await server.plane.reconciler.look_at_usage()
    await server.plane.tasks.shared_ended()


async def spend(server: Server, made: dict[str, Any], *, cpus: float, steps: int, sent: int = 0) -> None:
    """So many looks, with so much used between each."""
    node, clock = server.installation.node, server.installation.clock
    for _ in range(steps):
        clock.advance(STEP_S)
        if made["id"] not in node.sandboxes:
            return
        before = node.used.setdefault(made["id"], Usage())
        if not node.sandboxes[made["id"]].paused:
            node.used[made["id"]] = before + Usage(ran_s=STEP_S, cpu_seconds=STEP_S * cpus, sent_bytes=sent)
        await look(server)


async def audit(server: Server, action: str = "alarm") -> list[tuple[str, dict[str, Any]]]:
    entries = (await server.http.get("/v1/audit", params={"action": action})).json()["entries"]
    assert {entry["actor"] for entry in entries} <= {"system"}
    return [(entry["action"], entry["detail"]) for entry in entries]


async def actions(server: Server) -> list[str]:
    return [action for action, _ in await audit(server)]


async def create(server: Server, **values: Any) -> dict[str, Any]:
    return await server.created(**{"name": "box", "cpu": 2, "timeout_s": 86400, **values})


async def test_an_alarm_is_told_when_it_begins_and_when_it_ends(server: Server) -> None:
    made = await create(server)
    await spend(server, made, cpus=2, steps=53)
    assert (await server.get("box"))["active_alarms"] == []
    await spend(server, made, cpus=2, steps=61)
    shown = await server.get("box")
    assert shown["state"] == "running"
    [active] = shown["active_alarms"]
    assert (active["origin"], active["rule"]) == ("installation", rule("cpu=90%/10m").model_dump(mode="json"))
    assert set(active) == {"origin", "rule", "since"}
    await spend(server, made, cpus=0, steps=60)
    assert (await server.get("box"))["active_alarms"] == []
    (begin, first), (end, last) = await audit(server)
    assert (begin, end) == ("alarm.begin", "alarm.end")
    assert first["what"] == "it used 90% of its 2 CPUs within 10m"
    assert (first["rule"], first["origin"], first["action"]) == ("cpu=90%/10m", "installation", "audit")
    assert last["why"] == "it is below the limit again"
    assert last["cpu_seconds"] == pytest.approx(2 * STEP_S * 114, abs=2 * STEP_S)
    assert last["lasted_s"] >= 600
    await check_nothing_is_left(server)


@pytest.mark.parametrize(
    ("pattern", "alarms"),
    [
        pytest.param([0.0], 0, id="idle"),
        pytest.param([2.0, 0.0], 0, id="half the time"),
        pytest.param([2.0, 2.0, 2.0, 0.0], 0, id="three quarters"),
        pytest.param([1.7], 0, id="just below"),
        pytest.param([1.8], 1, id="just at it"),
        pytest.param([2.0] * 19 + [0.0], 1, id="with rare gaps"),
    ],
)
async def test_what_is_sustained(server: Server, pattern: list[float], alarms: int) -> None:
    made = await create(server)
    for index in range(75):
        await spend(server, made, cpus=pattern[index % len(pattern)], steps=1)
    assert len(await audit(server)) == alarms


async def test_a_load_around_its_limit_is_told_once_a_window_at_most(server: Server) -> None:
    made = await create(server)
    for index in range(180):
        await spend(server, made, cpus=2.0 if index % 40 < 36 else 0.9, steps=1)
    assert len(await audit(server)) <= 2 * (180 * STEP_S / 600)


async def test_of_all_rules_each_holds(server: Server) -> None:
    """A sandbox's own looser rule changes nothing; a stricter one comes first."""
    loose = await create(server, name="loose", alarms=["cpu=100%/1d"])
    strict = await create(server, name="strict", alarms=["cpu=40%/10m"])
    for made in (loose, strict):
        await spend(server, made, cpus=1, steps=62)
    assert [one["origin"] for one in (await server.get("strict"))["active_alarms"]] == ["sandbox"]
    assert (await server.get("loose"))["active_alarms"] == []
    await spend(server, loose, cpus=2, steps=60)
    assert [one["origin"] for one in (await server.get("loose"))["active_alarms"]] == ["installation"]


async def test_sent_bytes_and_connections(server: Server) -> None:
    made = await create(server, alarms=["sent=100MiB/10m", "connections=50/10m"])
    await spend(server, made, cpus=0, steps=11, sent=9 << 20)
    assert await audit(server) == []
    await spend(server, made, cpus=0, steps=1, sent=9 << 20)
    [(_, detail)] = await audit(server)
    assert detail["what"] == "it sent 108.0 MiB within 10m"
    common = {"at": server.installation.clock().isoformat(), "sandbox": made["id"], "kind": "tcp", "rule": "internet"}
    entries = server.installation.records.entries
    entries += [{"seq": 1, "event": "open", "connection": 1, **common}]
    entries += [{"seq": 2, "event": "gap", "verdict": "allowed", "count": 60, "connection": 2, **common}]
    entries += [{"seq": 3, "event": "refused", "count": 1000, "connection": 3, **common}]
    await server.plane.reconciler.ingest_connections()
    await spend(server, made, cpus=0, steps=1)
    assert (await audit(server))[1][1]["what"] == "it opened 61 connections within 10m"
    await spend(server, made, cpus=0, steps=120)
    ends = [detail for action, detail in await audit(server) if action == "alarm.end"]
    assert {detail.get("connections") for detail in ends} == {None, 61.0}
    assert [detail["sent_bytes"] for detail in ends if "sent_bytes" in detail] == [12 * 9 << 20]


async def test_what_was_used_before_the_first_look_counts(server: Server) -> None:
    """A quick one is done before anybody looks."""
    made = await create(server, alarms=["cpu=40%/10s", "sent=100MiB/10m", "connections=50/10m"])
    common = {"at": server.installation.clock().isoformat(), "sandbox": made["id"], "kind": "tcp", "rule": "internet"}
    server.installation.records.entries += [
        {"seq": 1, "event": "gap", "verdict": "allowed", "count": 60, "connection": 1, **common}
    ]
    await server.plane.reconciler.ingest_connections()
    await spend(server, made, cpus=1, steps=1, sent=200 << 20)
    found = {detail["rule"] for action, detail in await audit(server) if action == "alarm.begin"}
    assert found == {"cpu=40%/10s", "sent=100MiB/10m", "connections=50/10m"}


async def test_what_was_made_anew_is_not_held_to_what_it_was(server: Server) -> None:
    made = await create(server, alarms=["connections=50/10m"])
    common = {"at": server.installation.clock().isoformat(), "sandbox": made["id"], "kind": "tcp", "rule": "internet"}
    entries = server.installation.records.entries
    entries += [{"seq": 1, "event": "gap", "verdict": "allowed", "count": 40, "connection": 1, **common}]
    await server.plane.reconciler.ingest_connections()
    await spend(server, made, cpus=0, steps=1)
    await server.installation.node.die(made["id"], "killed by the kernel: out of memory")
    await server.settle()
    server.installation.node.used.pop(made["id"])
    await server.http.post(f"/v1/sandboxes/{made['id']}/recreate")
    entries += [{"seq": 2, "event": "gap", "verdict": "allowed", "count": 40, "connection": 2, **common}]
    await server.plane.reconciler.ingest_connections()
    await spend(server, made, cpus=0, steps=2)
    assert await audit(server) == []


async def test_paused_by_an_alarm_is_paused_until_somebody_resumes_it(server: Server) -> None:
    made = await create(server, alarms=["cpu=50%/5m:pause"])
    await spend(server, made, cpus=2, steps=20)
    shown = await server.get("box")
    assert (shown["state"], shown["active_alarms"]) == ("paused", [])
    assert shown["reason"].startswith("alarm of the sandbox (cpu=50%/5m:pause): it used ")
    assert await actions(server) == ["alarm.begin", "alarm.end"]
    assert (await audit(server))[1][1]["why"] == "the sandbox was paused"
    [(_, detail)] = await audit(server, "sandbox.pause")
    assert detail["reason"] == shown["reason"]
    suspended = server.installation.gateway.suspended[made["id"]]
    assert suspended["auto_resume"] is False  # no call or visit takes it up
    answer = await server.http.post(f"/v1/sandboxes/{made['id']}/resume")
    assert answer.status_code == 200, answer.text
    await spend(server, made, cpus=2, steps=10)  # a window anew
    assert (await server.get("box"))["state"] == "running"
    await spend(server, made, cpus=2, steps=10)
    assert (await server.get("box"))["state"] == "paused"
    await check_nothing_is_left(server)


async def test_killed_by_an_alarm(server: Server) -> None:
    made = await create(server, alarms=["cpu=50%/5m:pause", "cpu=50%/5m:kill"])
    await spend(server, made, cpus=2, steps=20)
    shown = await server.get(made["id"])
    assert (shown["state"], shown["active_alarms"]) == ("stopped", [])
    assert shown["reason"].startswith("alarm of the sandbox (cpu=50%/5m:kill): it used ")
    assert await actions(server) == ["alarm.begin"] * 2 + ["alarm.end"] * 2
    (_, intent), (_, outcome) = await audit(server, "sandbox.kill")
    assert intent["reason"] == outcome["reason"] == shown["reason"]
    await check_nothing_is_left(server)


async def test_its_owners_pauses_hide_nothing(server: Server) -> None:
    """Its own time stands still while it is paused, so a window goes on where it was."""
    made = await create(server)
    for _ in range(14):
        await spend(server, made, cpus=2, steps=5)
        await server.http.post(f"/v1/sandboxes/{made['id']}/pause")
        await spend(server, made, cpus=0, steps=2)
        await server.http.post(f"/v1/sandboxes/{made['id']}/resume")
    assert await actions(server) == ["alarm.begin"]
    await server.http.post(f"/v1/sandboxes/{made['id']}/pause")
    await spend(server, made, cpus=0, steps=61)
    assert await actions(server) == ["alarm.begin"]  # it goes on, as far as anyone knows


async def test_one_that_does_not_stand_still_is_killed(server: Server) -> None:
    made = await create(server, alarms=["cpu=50%/5m:pause"])
    server.installation.gateway.suspend_error = Conflict("cannot freeze", "2 run on", code="freeze_failed")
    await spend(server, made, cpus=2, steps=20)
    assert (await server.get("box"))["state"] == "running"
    await spend(server, made, cpus=2, steps=10)
    shown = await server.get(made["id"])
    assert shown["state"] == "stopped"
    assert shown["reason"].endswith("and it could not be paused: 2 run on")


@pytest.mark.parametrize("action", ["pause", "kill"])
async def test_one_whose_agent_answers_nobody_does_not_run_on_as_pausing(server: Server, action: str) -> None:
    """Its owner pauses it, its agent is silent, and its programs go on."""
    made = await create(server, alarms=[f"cpu=50%/5m:{action}"])
    gateway = server.installation.gateway
    gateway.suspend_error = gateway.attach_error = AgentFailure("cannot freeze", "no word", code="agent_unresponsive")
    assert (await server.http.post("/v1/sandboxes/box/pause")).status_code == 504
    assert (await server.get("box"))["state"] == "pausing"
    await spend(server, made, cpus=2, steps=30)
    assert (await server.get(made["id"]))["state"] == "stopped"
    assert (await actions(server)).count("alarm.begin") >= 1


async def test_the_platforms_own_trouble_is_not_held_against_it(server: Server) -> None:
    made = await create(server, alarms=["cpu=50%/5m:pause"])
    gateway = server.installation.gateway
    gateway.suspend_error = Unavailable("cannot reach the gateway", "it is down", code="gateway_unavailable")
    await spend(server, made, cpus=2, steps=40)
    gateway.suspend_error = Conflict("cannot freeze", "2 run on", code="freeze_failed")
    await spend(server, made, cpus=2, steps=6)  # a minute of its own unwillingness is not over yet
    assert (await server.get("box"))["state"] == "running"
    await spend(server, made, cpus=2, steps=1)
    assert (await server.get(made["id"]))["state"] == "stopped"


async def test_an_action_that_the_platform_could_not_take_is_tried_again(server: Server) -> None:
    made = await create(server, alarms=["cpu=50%/5m:pause"])
    gateway = server.installation.gateway
    gateway.suspend_error = Unavailable("cannot reach the gateway", "it is down", code="gateway_unavailable")
    await spend(server, made, cpus=2, steps=60)
    assert (await server.get("box"))["state"] == "running"
    gateway.suspend_error = None
    await spend(server, made, cpus=2, steps=1)
    assert (await server.get("box"))["state"] == "paused"
    assert await actions(server) == ["alarm.begin", "alarm.begin", "alarm.end", "alarm.end"]


async def test_the_end_of_its_sandbox_ends_an_alarm(server: Server) -> None:
    made = await create(server)
    await spend(server, made, cpus=2, steps=60)
    await server.kill("box")
    await look(server)
    assert [(action, detail.get("why")) for action, detail in await audit(server)] == [
        ("alarm.begin", None),
        ("alarm.end", "the sandbox is stopped"),
    ]
    assert (await server.get(made["id"]))["active_alarms"] == []
    await look(server)
    assert len(await audit(server)) == 2


async def test_a_restarted_server_says_nothing_twice_and_ends_what_went_on(installation: Installation) -> None:
    installation_rules = {"alarms": (rule("cpu=90%/10m"),)}
    async with installation.serve(**installation_rules) as server:
        going, ending = await create(server, name="going"), await create(server, name="ending")
        for made in (going, ending):
            await spend(server, made, cpus=2, steps=60)
    async with installation.serve(**installation_rules) as server:
        await server.kill(ending["id"])
    async with installation.serve(**installation_rules) as server:
        await spend(server, going, cpus=2, steps=120)
        assert sorted(await actions(server)) == ["alarm.begin", "alarm.begin", "alarm.end"]
        await spend(server, going, cpus=0, steps=10)
        assert sorted(await actions(server)) == ["alarm.begin", "alarm.begin", "alarm.end", "alarm.end"]
        last = (await audit(server))[-1][1]
        assert last["cpu_seconds"] == pytest.approx(2 * STEP_S * 179, abs=4 * STEP_S)


async def test_a_node_that_is_away_or_restarts_makes_no_alarm_and_hides_none(server: Server) -> None:
    made = await create(server)
    node = server.installation.node
    await spend(server, made, cpus=0.1, steps=3)
    node.reachable = False
    with pytest.raises(Unavailable):
        await look(server)
    node.reachable = True
    node.used[made["id"]] += Usage(ran_s=3600, cpu_seconds=3600)  # half of its CPUs for an hour that nobody saw
    await look(server)
    assert await audit(server) == []
    node.used[made["id"]] += Usage(ran_s=3600, cpu_seconds=7000)
    await look(server)
    assert await actions(server) == ["alarm.begin"]
    node.used[made["id"]] = Usage(ran_s=5, cpu_seconds=1e6)  # another count
    await spend(server, made, cpus=0, steps=59)
    assert await actions(server) == ["alarm.begin"]
    await spend(server, made, cpus=0, steps=2)
    assert await actions(server) == ["alarm.begin", "alarm.end"]


async def test_a_workspaces_rules_hold_for_what_is_there(server: Server) -> None:
    made = await create(server)
    await spend(server, made, cpus=1, steps=60)
    answer = await server.http.put("/v1/workspace/alarms", json={"rules": ["cpu=40%/5m:kill"]})
    assert answer.status_code == 200, answer.text
    assert [one["limit"] for one in answer.json()["rules"]] == [0.4]
    assert [one["limit"] for one in answer.json()["installation"]] == [0.9]
    assert answer.json() == (await server.http.get("/v1/workspace/alarms")).json()
    await spend(server, made, cpus=1, steps=40)
    shown = await server.get(made["id"])
    assert shown["state"] == "stopped"
    assert shown["reason"].startswith("alarm of the workspace (cpu=40%/5m:kill)")


async def test_a_rule_that_is_taken_back_ends_its_alarm(server: Server) -> None:
    made = await create(server)
    await server.http.put("/v1/workspace/alarms", json={"rules": ["cpu=40%/5m"]})
    await spend(server, made, cpus=1, steps=40)
    await server.http.put("/v1/workspace/alarms", json={"rules": []})
    await spend(server, made, cpus=1, steps=1)
    told = await audit(server)
    assert (told[-1][0], told[-1][1]["why"]) == ("alarm.end", "the rule does not hold any more")


async def test_who_may_change_a_workspaces_rules(server: Server, installation: Installation) -> None:
    """A tenant's key for sandboxes does not, and neither it nor a key for the workspace changes the installation's."""
    async with server.plane.database.write() as connection:
        await connection.execute(insert(Workspace).values(id="w2", name="tenant", created_at=installation.clock()))
        few = [one for one in Permission if one is not Permission.WORKSPACE_WRITE]
        clock = installation.clock
        tenant = await create_key(connection, workspace="w2", name="tenant", clock=clock, permissions=few)
        owner = await create_key(connection, workspace="w2", name="owner", clock=clock)
    body = {"rules": []}
    refused = await server.http.put("/v1/workspace/alarms", json=body, headers={"authorization": f"Bearer {tenant}"})
    assert refused.status_code == 403, refused.text
    answer = await server.http.put("/v1/workspace/alarms", json=body, headers={"authorization": f"Bearer {owner}"})
    assert len(answer.json()["installation"]) == 1
    other = await server.http.put(
        "/v1/workspace/alarms", json={"rules": ["cpu=1%/5s:kill"]}, headers={"authorization": f"Bearer {owner}"}
    )
    assert other.status_code == 200
    made = await create(server)  # of another workspace
    await spend(server, made, cpus=1, steps=30)
    assert (await server.get("box"))["state"] == "running"


async def test_changing_rules_again_and_again_hides_nothing(server: Server) -> None:
    made = await create(server)
    for index in range(70):
        await server.http.put("/v1/workspace/alarms", json={"rules": [f"cpu=95%/{600 + index}s"]})
        await spend(server, made, cpus=2, steps=1)
    assert "alarm.begin" in await actions(server)


async def test_forks_and_snapshots_have_the_rules_of_what_they_are_made_of(server: Server) -> None:
    made = await create(server, alarms=["cpu=50%/5m:kill"])
    forked = (await server.http.post(f"/v1/sandboxes/{made['id']}/fork", json={"count": 1})).json()["sandboxes"][0]
    assert forked["sandbox"]["alarms"] == made["alarms"] != []
    snapshot = (await server.http.post(f"/v1/sandboxes/{made['id']}/snapshots", json={})).json()
    again = await server.created(snapshot=snapshot["id"])
    assert again["alarms"] == made["alarms"]
    own = await server.created(snapshot=snapshot["id"], alarms=["cpu=60%/5m"])
    assert [one["limit"] for one in own["alarms"]] == [0.6]


@pytest.mark.parametrize("text", ["cpu=90/10m", "cpu=0%/10m", "disk=1GiB/10m", "cpu=90%/1s", "cpu=90%/10m:shout", ""])
async def test_a_rule_that_cannot_be_read_names_its_field(server: Server, text: str) -> None:
    answer = await server.create(alarms=[text])
    assert answer.status_code == 422, answer.text
    assert "alarms" in answer.json()["error"]["details"]["field"]


async def test_at_most_so_many_rules(server: Server) -> None:
    answer = await server.create(alarms=[f"cpu=90%/{60 + index}s" for index in range(17)])
    assert answer.status_code == 422


async def test_without_rules_nothing_is_told(installation: Installation) -> None:
    async with installation.serve() as server:
        made = await create(server)
        await spend(server, made, cpus=2, steps=70)
        assert await audit(server) == []
