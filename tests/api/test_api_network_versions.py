"""A node that has a later version of a policy than the database: what is on record is put in force, or told as not."""

from __future__ import annotations

import asyncio

from control_plane import Server, error_of
from cpuos.server.db.sandboxes import row_of
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer


def of_another_history(server: Server, sandbox: str, *, version: int) -> None:
    """As after a database was put back: the node was told things that it knows nothing of."""
    layers = [PolicyLayer(origin="sandbox", policy=NetworkPolicy.model_validate({"allow": ["other.example"]}))]
    server.installation.node.policies[sandbox] = EffectivePolicy(version=version, layers=layers)


async def test_what_is_on_record_replaces_a_later_history(server: Server) -> None:
    sandbox = (await server.created())["id"]
    of_another_history(server, sandbox, version=40)
    answer = await server.http.put(f"/v1/sandboxes/{sandbox}/network", json={"mode": "off"})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["version"], answer.json()["applied"]) == (41, True)
    told = server.installation.node.policies[sandbox]
    assert (told.version, told.layers[-1].policy.mode) == (41, "off")
    again = await server.http.put(f"/v1/sandboxes/{sandbox}/network", json={"mode": "internet"})
    assert (again.json()["version"], again.json()["applied"]) == (42, True)


async def test_the_same_version_of_another_history_is_replaced_too(server: Server) -> None:
    sandbox = (await server.created())["id"]
    of_another_history(server, sandbox, version=2)
    answer = await server.http.put("/v1/workspace/network", json={"mode": "off"})
    assert answer.status_code == 200, answer.text
    told = server.installation.node.policies[sandbox]
    assert {layer.origin: layer.policy.mode for layer in told.layers} == {"workspace": "off", "sandbox": "internet"}


async def test_a_call_that_was_overtaken_is_answered_with_what_holds(server: Server) -> None:
    """Two changes at once reach the node in the other order."""
    sandbox = (await server.created())["id"]
    path = f"/v1/sandboxes/{sandbox}/network"
    tell, overtaken = server.plane.networks.tell, []

    async def late(row, **options):
        if not overtaken:
            overtaken.append(row.network_version)
            assert (await server.http.put(path, json={"deny": ["second.example"]})).status_code == 200
        return await tell(row, **options)

    server.plane.networks.tell = late
    answer = await server.http.put(path, json={"deny": ["first.example"]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["policy"]["deny"] == ["second.example"], "the newest that is on record"
    assert answer.json()["applied"]
    assert overtaken == [2]
    told = server.installation.node.policies[sandbox]
    assert told.layers[-1].policy.deny == ["second.example"]
    assert told.version == answer.json()["version"] == 3


async def test_a_node_that_never_takes_it_is_told_as_not_yet(server: Server) -> None:
    sandbox = (await server.created())["id"]
    node = server.installation.node
    node.policies[sandbox] = node.policies[sandbox].model_copy(update={"version": 2**60})
    async with asyncio.timeout(60):
        answer = await server.http.put(f"/v1/sandboxes/{sandbox}/network", json={"mode": "off"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "node_unavailable")
    assert (await server.http.get(f"/v1/sandboxes/{sandbox}/network")).json()["applied"] is False


async def test_a_version_never_stands_for_two_policies(server: Server) -> None:
    """A workspace's policy is changed between the read of a record and that of its workspace."""
    sandbox = (await server.created())["id"]
    async with server.plane.database.read() as connection:
        before = await row_of(connection, sandbox)
    assert (await server.http.put("/v1/workspace/network", json={"mode": "off"})).status_code == 200
    told = await server.plane.networks.effective(before)
    assert (told.version, told.layers[0].policy.mode) == (2, "off")
