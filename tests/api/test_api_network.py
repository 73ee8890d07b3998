"""Network policies over the API: what is stored, what the node is told, and what happens while it does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import insert

from control_plane import Installation, Server, error_of
from cpuos.server.auth import create_key
from cpuos.server.db.models import Workspace
from cpuos.testing.waiting import until

AT = "2026-01-01T00:00:00Z"


def layers(server: Server, sandbox: str) -> dict[str, dict[str, Any]]:
    policy = server.installation.node.policies[sandbox]
    return {layer.origin: layer.policy.model_dump(mode="json") for layer in policy.layers}


async def test_a_create_says_nothing_and_gets_the_internet(server: Server) -> None:
    sandbox = await server.created()
    assert sandbox["network"] == {"mode": "internet", "allow": [], "deny": []}
    assert layers(server, sandbox["id"])["sandbox"]["mode"] == "internet"
    assert server.installation.node.policies[sandbox["id"]].version == 1


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("off", {"mode": "off", "allow": [], "deny": []}),
        ({"allow": ["*.Allowed.Example", "1.2.3.0/24:443"]}, {"mode": "allowlist", "allow": ["*.allowed.example", "1.2.3.0/24:443"], "deny": []}),  # noqa: E501
        ({"deny": ["a.example", "a.example."]}, {"mode": "internet", "allow": [], "deny": ["a.example"]}),
        ({"allow": []}, {"mode": "allowlist", "allow": [], "deny": []}),
    ],
)  # fmt: skip
async def test_a_policy_is_stored_canonically_and_told(server: Server, asked: Any, stored: dict[str, Any]) -> None:
    sandbox = await server.created(network=asked)
    assert sandbox["network"] == stored
    assert layers(server, sandbox["id"])["sandbox"] == stored


@pytest.mark.parametrize(
    "bad",
    [
        "on",
        {"mode": "internet", "allow": ["a.example"]},
        {"allow": ["*"]},
        {"deny": ["fe80::1"]},
        {"allow": ["a:0"]},
        {"x": 1},
        3,
    ],
)
async def test_a_bad_policy_makes_nothing(server: Server, bad: Any) -> None:
    answer = await server.create(network=bad)
    assert answer.status_code == 422 or answer.status_code == 400, answer.text
    assert error_of(answer)["details"]["field"].startswith("network")
    assert server.installation.node.sandboxes == {}


async def test_an_update_is_told_with_a_higher_version(server: Server) -> None:
    sandbox = (await server.created())["id"]
    answer = await server.http.put(f"/v1/sandboxes/{sandbox}/network", json={"allow": ["a.example"]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["applied"] is True
    assert answer.json()["version"] == 2
    assert server.installation.node.policies[sandbox].version == 2
    assert layers(server, sandbox)["sandbox"]["allow"] == ["a.example"]
    assert (await server.http.get(f"/v1/sandboxes/{sandbox}/network")).json() == answer.json()
    assert (await server.get(sandbox))["network"]["mode"] == "allowlist"


async def test_the_workspace_holds_for_all_its_sandboxes(server: Server) -> None:
    old = (await server.created())["id"]
    answer = await server.http.put("/v1/workspace/network", json={"deny": ["evil.example"]})
    assert answer.status_code == 200, answer.text
    new = (await server.created(network="off"))["id"]
    for sandbox in (old, new):
        assert layers(server, sandbox)["workspace"]["deny"] == ["evil.example"]
    assert (await server.http.get("/v1/workspace/network")).json()["policy"]["deny"] == ["evil.example"]
    assert (await server.http.get(f"/v1/sandboxes/{old}/network")).json()["workspace_policy"]["deny"] == [
        "evil.example"
    ]


async def test_another_workspace_sets_its_own_policy_only(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await server.http.put("/v1/workspace/network", json={"deny": ["evil.example"]})
    clock = server.installation.clock
    async with server.plane.database.write() as connection:
        await connection.execute(insert(Workspace).values(id="other", name="other", created_at=clock()))
        key = await create_key(connection, workspace="other", name="k", clock=clock)
    theirs = {"authorization": f"Bearer {key}"}
    answer = await server.http.get("/v1/workspace/network", headers=theirs)
    assert answer.json()["policy"]["deny"] == []
    answer = await server.http.put("/v1/workspace/network", json={"mode": "internet"}, headers=theirs)
    assert answer.status_code == 200, answer.text
    assert layers(server, sandbox)["workspace"]["deny"] == ["evil.example"]
    assert (await server.http.get("/v1/workspace/network")).json()["policy"]["deny"] == ["evil.example"]


async def test_a_node_that_is_away_is_told_later(server: Server) -> None:
    sandbox = (await server.created())["id"]
    server.installation.node.reachable = False
    answer = await server.http.put(f"/v1/sandboxes/{sandbox}/network", json={"mode": "off"})
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "node_unavailable"
    assert (await server.http.get(f"/v1/sandboxes/{sandbox}/network")).json()["applied"] is False
    server.installation.node.reachable = True
    await server.settle()
    assert layers(server, sandbox)["sandbox"]["mode"] == "off"
    assert (await server.http.get(f"/v1/sandboxes/{sandbox}/network")).json()["applied"] is True


async def test_what_was_not_told_is_told_by_the_next_server(installation: Installation) -> None:
    async with installation.serve() as server:
        sandbox = (await server.created())["id"]
        installation.node.reachable = False
        await server.http.put("/v1/workspace/network", json={"mode": "off"})
    installation.node.reachable = True
    async with installation.serve() as server:
        await server.settle()
        assert layers(server, sandbox)["workspace"]["mode"] == "off"


async def test_a_change_while_it_is_created_holds_before_the_create_answers(server: Server) -> None:
    gateway = server.installation.gateway
    gateway.attach_gate.clear()
    creating = asyncio.create_task(server.created())
    await until(lambda: _is_on_the_node(server))
    assert (await server.http.put("/v1/workspace/network", json={"mode": "off"})).status_code == 200
    gateway.attach_gate.set()
    sandbox = (await creating)["id"]
    assert layers(server, sandbox)["workspace"]["mode"] == "off"


async def _is_on_the_node(server: Server) -> bool:
    return bool(server.installation.node.sandboxes)


async def test_an_ended_sandbox_has_no_network_to_change(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await server.kill(sandbox)
    answer = await server.http.put(f"/v1/sandboxes/{sandbox}/network", json={"mode": "off"})
    assert answer.status_code == 410
    assert error_of(answer)["code"] == "sandbox_stopped"


def entry(seq: int, sandbox: str, *, event: str = "open", **fields: Any) -> dict[str, Any]:
    known = {"at": AT, "kind": "tcp", "address": "93.184.215.14", "port": 443, "connection": seq, "rule": "internet"}
    return {"seq": seq, "sandbox": sandbox, "event": event, **known, **fields}


async def connections(server: Server, sandbox: str, **query: Any) -> list[dict[str, Any]]:
    answer = await server.http.get(f"/v1/sandboxes/{sandbox}/connections", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["connections"]


async def test_connections_are_taken_over_once_and_completed(server: Server) -> None:
    sandbox = (await server.created())["id"]
    records = server.installation.records
    records.entries = [
        entry(1, sandbox, name="a.example"),
        entry(2, sandbox, event="refused", rule="always blocked: link-local", address="169.254.169.254", count=3),
        entry(3, "a" * 20),
        {"seq": 4, "nonsense": True},
    ]
    first = await connections(server, sandbox)
    assert [(one["verdict"], one["count"], one["ended_at"]) for one in first] == [
        ("allowed", 1, None),
        ("refused", 3, None),
    ]
    records.entries.append(entry(5, sandbox, event="closed", connection=1, bytes_sent=10, bytes_received=1 << 40))
    records.entries.append(entry(6, sandbox, event="gap", kind="gap", address=None, port=None, count=7))
    seen = await connections(server, sandbox)
    assert [one["id"] for one in seen[:2]] == [one["id"] for one in first]
    assert (seen[0]["bytes_sent"], seen[0]["bytes_received"], bool(seen[0]["ended_at"])) == (10, 1 << 40, True)
    assert (seen[2]["kind"], seen[2]["count"]) == ("gap", 7)
    assert [one["rule"] for one in await connections(server, sandbox, verdict="refused")] == [
        "always blocked: link-local"
    ]
    paged = await server.http.get(f"/v1/sandboxes/{sandbox}/connections", params={"limit": 2})
    assert len(paged.json()["connections"]) == 2
    assert len(await connections(server, sandbox, after=paged.json()["next_after"])) == 1


async def test_a_new_records_worker_counts_anew(installation: Installation) -> None:
    async with installation.serve() as server:
        sandbox = (await server.created())["id"]
        installation.records.entries = [entry(1, sandbox), entry(2, sandbox)]
        assert len(await connections(server, sandbox)) == 2
    async with installation.serve() as server:  # a restart takes nothing twice
        assert len(await connections(server, sandbox)) == 2
        installation.records.source, installation.records.entries = "records-2", [entry(1, sandbox)]
        assert len(await connections(server, sandbox)) == 3


def command(seq: int, sandbox: str, name: str, *, second: int, ends: int | None = None) -> dict[str, Any]:
    """An intent of the gateway's journal, or with `ends` the outcome of that one."""
    phase = {"phase": "intent"} if ends is None else {"phase": "outcome", "intent": ends, "result": "ok"}
    told = {"actor": "key:1", "action": "command.start", "target": name, "at": f"2026-01-01T00:00:{second:02}Z"}
    return {"seq": seq, "sandbox": sandbox, "workspace": "default", "detail": {}, **told, **phase}


async def test_a_connection_tells_the_command_that_ran_alone_then(server: Server) -> None:
    sandbox, other = (await server.created())["id"], (await server.created())["id"]
    server.installation.gateway.entries = [
        command(1, sandbox, "first", second=10),
        command(2, other, "elsewhere", second=10),
        command(3, sandbox, "first", second=20, ends=1),
        command(4, sandbox, "second", second=30),
        command(5, sandbox, "third", second=40),
        command(6, sandbox, "second", second=50, ends=4),
    ]
    moments = (5, 10, 15, 25, 35, 45, 55)
    server.installation.records.entries = [
        entry(number, sandbox, at=f"2026-01-01T00:00:{second:02}Z") for number, second in enumerate(moments, 1)
    ]
    seen = await connections(server, sandbox)
    assert [one["command"] for one in seen] == [None, "first", "first", None, "second", None, "third"]
    later = await connections(server, sandbox, after=seen[3]["id"])  # a page of its own tells the same
    assert [one["command"] for one in later] == ["second", None, "third"]


async def test_one_sandbox_does_not_fill_the_database(installation: Installation) -> None:
    async with installation.serve(connection_records=100) as server:
        sandbox, other = (await server.created())["id"], (await server.created())["id"]
        records = installation.records
        records.entries = [
            entry(number, sandbox, event="open" if number % 2 else "refused") for number in range(1, 301)
        ]
        assert len(await connections(server, sandbox, limit=1000)) == 102
        records.entries.append(entry(301, sandbox, event="closed", connection=1, bytes_sent=7))
        records.entries.append(entry(302, sandbox, event="closed", connection=299, bytes_sent=7))
        records.entries.append(entry(303, sandbox, event="refused", count=5))
        records.entries.append(entry(304, other))
        seen = await connections(server, sandbox, limit=1000)
        assert len(seen) == 102
        assert seen[0]["bytes_sent"] == 7
        counted = {one["verdict"]: one["count"] for one in seen if one["kind"] == "gap"}
        assert counted == {"allowed": 100, "refused": 105}
        assert len(await connections(server, other)) == 1


async def test_records_of_connections_end_with_their_time(installation: Installation) -> None:
    async with installation.serve(connection_retention_s=3600) as server:
        sandbox = (await server.created(timeout_s=86400))["id"]
        installation.records.entries = [entry(1, sandbox), entry(2, sandbox, at="2026-01-01T01:30:00Z")]
        assert len(await connections(server, sandbox)) == 2
        await server.settle()
        assert len(await connections(server, sandbox)) == 2
        installation.clock.advance(2 * 3600)
        await server.settle()
        assert [one["at"] for one in await connections(server, sandbox)] == ["2026-01-01T01:30:00Z"]
