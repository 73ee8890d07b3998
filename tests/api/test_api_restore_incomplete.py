"""A resume that would go on with less than was paused: refused with the list, unless that is asked for."""

from __future__ import annotations

import asyncio

import pytest

from control_plane import Installation, Server, check_nothing_is_left, error_of
from cpuos.server.db.sandboxes import row_of
from cpuos.server.gateway import Suspended
from cpuos.testing.waiting import until

GONE = ["process 12 (python3)", "command aaaaaaaaaaaaaaaa", "listener on 0.0.0.0:8000"]
DISK = ["/workspace as it was: its disk was changed while it was paused"]


async def pause(server: Server) -> None:
    answer = await server.http.post("/v1/sandboxes/one/pause")
    assert answer.status_code == 200, answer.text


async def audit(server: Server) -> list[dict]:
    entries = (await server.http.get("/v1/audit", params={"sandbox": "one"})).json()["entries"]
    return [entry["detail"] for entry in entries if entry["action"] == "sandbox.restore_incomplete"]


@pytest.mark.parametrize(("part", "missing"), [("gateway", GONE), ("node", DISK)])
async def test_it_stays_paused_with_the_list_until_that_is_accepted(
    server: Server, part: str, missing: list[str]
) -> None:
    made = await server.created(name="one")
    await pause(server)
    getattr(server.installation, part).missing[made["id"]] = missing
    for times in (1, 2):
        answer = await server.http.post("/v1/sandboxes/one/resume")
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (409, "restore_incomplete")
        assert error["details"]["missing"] == missing
        assert error["what"].endswith("it stays paused")
        assert f"cpuos resume --incomplete {made['id']}" in error["try"]
        told = await server.get("one")
        assert (told["state"], told["restore_incomplete"]) == ("paused", missing)
        assert missing[0] in told["reason"]
        assert [entry["missing"] for entry in await audit(server)] == [missing] * times
    await check_nothing_is_left(server)
    node = server.installation.node
    if part == "gateway":  # its guest has refused: what was saved of its processes stays good
        assert node.repaused_frozen == [True, True]
    running = (await server.http.post("/v1/sandboxes/one/resume?incomplete=true")).json()
    assert (running["state"], running["resumed_from"]) == ("running", "memory")
    assert running["restore_incomplete"] == missing
    assert missing[0] in running["reason"]
    assert (await audit(server))[0]["missing"] == missing
    getattr(server.installation, part).missing.clear()
    await pause(server)
    assert (await server.get("one"))["restore_incomplete"] is None
    again = (await server.http.post("/v1/sandboxes/one/resume")).json()
    assert (again["state"], again["restore_incomplete"], again["reason"]) == ("running", [], "")


async def test_a_call_does_not_go_on_with_less_by_itself(server: Server) -> None:
    made = await server.created(name="one")
    await pause(server)
    server.installation.gateway.missing[made["id"]] = GONE
    await server.plane.reconciler._wakes.wake([made["id"]])
    await server.settle()
    told = await server.get("one")
    assert (told["state"], told["restore_incomplete"]) == ("paused", GONE)


async def test_a_server_that_ends_within_an_accepted_resume_accepts_nothing_by_itself(
    installation: Installation,
) -> None:
    """What was asked of it is not on record: the next one refuses, and nothing is lost."""
    node, gateway = installation.node, installation.gateway
    async with installation.serve(stop_grace_s=0) as server:
        made = await server.created(name="one")
        await pause(server)
        gateway.missing[made["id"]] = GONE
        gateway.attach_gate.clear()
        call = asyncio.create_task(server.http.post("/v1/sandboxes/one/resume?incomplete=true"))
        await until(lambda: not node.sandboxes[made["id"]].paused)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    gateway.attach_gate.set()
    async with installation.serve() as server:
        await server.settle()
        assert ((await server.get("one"))["state"], node.repaused_frozen) == ("paused", [True])
        await check_nothing_is_left(server)
        assert (await server.http.post("/v1/sandboxes/one/resume?incomplete=true")).json()["state"] == "running"


async def test_labels_are_held_against_the_receipt_not_against_what_was_changed_since(server: Server) -> None:
    made = await server.created(name="one", labels={"a": "1"})
    await pause(server)
    assert server.installation.node.labels[made["id"]] == {"a": "1"}
    changed = await server.http.patch("/v1/sandboxes/one", json={"labels": {"a": "2"}})
    assert changed.status_code == 200, changed.text
    running = (await server.http.post("/v1/sandboxes/one/resume")).json()
    assert (running["state"], running["labels"], running["restore_incomplete"]) == ("running", {"a": "2"}, [])


async def test_a_record_of_another_history_than_the_pause(server: Server) -> None:
    """As after a database was put back from a backup: its receipt is not the one of this pause."""
    made = await server.created(name="one", labels={"a": "1"})
    await pause(server)
    server.installation.node.labels[made["id"]] = {"a": "of later"}
    error = error_of(await server.http.post("/v1/sandboxes/one/resume"))
    assert (error["code"], error["details"]["missing"]) == ("restore_incomplete", ["the labels as they were"])
    assert (await server.get("one"))["state"] == "paused"
    running = (await server.http.post("/v1/sandboxes/one/resume?incomplete=true")).json()
    assert (running["state"], running["restore_incomplete"]) == ("running", ["the labels as they were"])


async def test_the_receipt_names_the_processes(server: Server) -> None:
    made = await server.created(name="one")
    server.installation.gateway.told[made["id"]] = Suspended(
        processes=2, listeners=[], commands=[], programs=["12 python3", "13 sh"]
    )
    await pause(server)
    async with server.plane.database.read() as connection:
        row = await row_of(connection, made["id"])
    assert row.receipt["programs"] == ["12 python3", "13 sh"]
