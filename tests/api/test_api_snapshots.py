"""Snapshots and forks: what they keep, what they refuse, and what another workspace can do with them: nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from sqlalchemy import insert, update

from control_plane import Installation, Server, check_nothing_is_left, error_of
from cpuos.errors import CapacityExceeded, Conflict, PlatformError, Unavailable
from cpuos.server.auth import create_key
from cpuos.server.db.models import Workspace
from cpuos.testing.waiting import until
from cpuos.types.node import RuntimeFacts
from cpuos.types.sandbox import Isolation

DISK_FULL = PlatformError("cannot make it", "the volume is full", code="disk_full")


async def snapshot(server: Server, ref: str = "one", **body: Any) -> httpx2.Response:
    return await server.http.post(f"/v1/sandboxes/{ref}/snapshots", json=body)


async def made(server: Server, ref: str = "one", **body: Any) -> dict[str, Any]:
    answer = await snapshot(server, ref, **body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def fork(server: Server, path: str, **body: Any) -> httpx2.Response:
    return await server.http.post(f"/v1/{path}/fork", json=body)


async def limit(server: Server, **limits: int) -> None:
    async with server.plane.database.write() as connection:
        await connection.execute(update(Workspace).values(**limits))


async def other_key(server: Server) -> dict[str, str]:
    clock = server.installation.clock
    async with server.plane.database.write() as connection:
        await connection.execute(insert(Workspace).values(id="other", name="other", created_at=clock()))
        key = await create_key(connection, workspace="other", name="k", clock=clock)
    return {"authorization": f"Bearer {key}"}


async def test_who_has_an_emulated_sandbox_may_fork_it(server: Server) -> None:
    """It was asked for when it was made. A create says so itself, whatever it begins with."""
    emulated = RuntimeFacts(name="microvm", available=True, isolation=Isolation.EMULATED, detail="qemu tcg")
    server.installation.node.runtimes[:] = [emulated]
    await server.settle()
    await server.created(name="one", runtime="microvm", allow_emulated=True)
    snap = await made(server)
    for path in ("sandboxes/one", f"snapshots/{snap['id']}"):
        answer = await fork(server, path, count=2)
        assert answer.status_code == 201, answer.text
        assert {one["sandbox"]["isolation"] for one in answer.json()["sandboxes"]} == {"emulated"}
    assert error_of(await server.create(snapshot=snap["id"]))["code"] == "runtime_unavailable"
    await server.created(snapshot=snap["id"], allow_emulated=True)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_snapshot_tells_what_it_is(server: Server, paused: bool) -> None:
    await server.created(name="one", cpu=1, memory_mib=512, disk_mib=1024, labels={"a": "b"}, network={"mode": "off"})
    if paused:
        await server.http.post("/v1/sandboxes/one/pause")
    snap = await made(server, name="base")
    assert (snap["state"], snap["name"], snap["memory"], snap["size_bytes"]) == ("ready", "base", True, 1 << 20)
    assert (snap["cpu"], snap["memory_mib"], snap["disk_mib"], snap["labels"]) == (1, 512, 1024, {"a": "b"})
    assert snap["network"]["mode"] == "off"
    listed = (await server.http.get("/v1/snapshots")).json()["snapshots"]
    assert listed == [snap] == (await server.http.get("/v1/snapshots?sandbox=one")).json()["snapshots"]
    assert (await server.http.get("/v1/snapshots/base")).json() == snap
    assert (await server.get("one"))["state"] == ("paused" if paused else "running")
    await check_nothing_is_left(server)


async def test_a_sandbox_that_begins_with_one(server: Server) -> None:
    await server.created(name="one", cpu=1, memory_mib=512, disk_mib=1024, labels={"a": "b"}, network={"mode": "off"})
    snap = await made(server, name="base")
    box = await server.created(snapshot="base")
    assert (box["cpu"], box["memory_mib"], box["disk_mib"], box["labels"]) == (1, 512, 1024, {"a": "b"})
    assert (box["snapshot"], box["network"]["mode"]) == (snap["id"], "off")
    assert server.installation.node.begun_with[box["id"]] == (snap["id"], True)
    again = await server.created(snapshot=snap["id"][:6], network={"mode": "internet"}, labels={}, cpu=1)
    assert (again["network"]["mode"], again["labels"]) == ("internet", {})
    cold = await made(server, memory=False)
    box = await server.created(snapshot=cold["id"])
    assert server.installation.node.begun_with[box["id"]] == (cold["id"], False)
    await check_nothing_is_left(server)


@pytest.mark.parametrize("given", [{"cpu": 4}, {"template": "base"}, {"disk_mib": 64}, {"runtime": "firecracker"}])
async def test_what_does_not_fit_the_snapshot_is_refused(server: Server, given: dict[str, Any]) -> None:
    await server.created(name="one", cpu=1)
    await made(server, name="base")
    answer = await server.create(snapshot="base", **given)
    assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_request")
    assert error_of(answer)["details"]["field"] in given


async def test_a_snapshot_that_fails_leaves_the_sandbox_running(server: Server) -> None:
    await server.created(name="one")
    server.installation.node.errors["snapshot"] = DISK_FULL
    answer = await snapshot(server, name="base")
    assert error_of(answer)["code"] == "disk_full"
    (failed,) = (await server.http.get("/v1/snapshots")).json()["snapshots"]
    assert (failed["state"], "volume is full" in failed["reason"]) == ("failed", True)
    error = error_of(await server.create(snapshot=failed["id"]))
    assert error["code"] == "wrong_state"
    await check_nothing_is_left(server)
    del server.installation.node.errors["snapshot"]
    await made(server, name="base")  # the name is free
    server.installation.clock.advance(86401)
    await server.settle()
    assert [one["state"] for one in (await server.http.get("/v1/snapshots")).json()["snapshots"]] == ["ready"]


async def test_a_name_is_unique_among_those_kept(server: Server) -> None:
    await server.created(name="one")
    await made(server, name="base")
    answer = await snapshot(server, name="base")
    assert (answer.status_code, error_of(answer)["code"]) == (409, "name_taken")
    await check_nothing_is_left(server)


async def test_removal(server: Server) -> None:
    await server.created(name="one")
    snap = await made(server, name="base")
    node = server.installation.node
    node.errors["delete_snapshot"] = Conflict("cannot remove it", "a create reads it", code="snapshot_in_use")
    answer = await server.http.delete("/v1/snapshots/base")
    assert error_of(answer)["code"] == "snapshot_in_use"
    assert (await server.http.get("/v1/snapshots/base")).json()["state"] == "ready"
    node.errors["delete_snapshot"] = Unavailable("cannot reach it", "down", code="node_unavailable")
    assert (await server.http.delete("/v1/snapshots/base")).status_code == 503
    del node.errors["delete_snapshot"]
    await server.settle()
    assert error_of(await server.http.get(f"/v1/snapshots/{snap['id']}"))["code"] == "snapshot_not_found"
    await check_nothing_is_left(server)


async def test_a_fork_of_a_sandbox(server: Server) -> None:
    await server.created(name="one", cpu=1, idle_timeout_s=60, labels={"a": "b"}, timeout_s=77)
    answer = await fork(server, "sandboxes/one", count=3)
    assert answer.status_code == 201, answer.text
    boxes = [one["sandbox"] for one in answer.json()["sandboxes"]]
    assert len({box["id"] for box in boxes}) == 3
    assert all(one["access"]["ticket"] for one in answer.json()["sandboxes"])
    assert {(box["state"], box["cpu"], box["timeout_s"], box["idle_timeout_s"]) for box in boxes} == {
        ("running", 1, 77.0, 60.0)
    }
    assert [box["labels"] for box in boxes] == [{"a": "b"}] * 3
    assert (await server.http.get("/v1/snapshots")).json()["snapshots"] == []
    assert server.installation.node.snapshots_kept == {}
    await check_nothing_is_left(server)


async def test_a_fork_is_whole_or_nothing(server: Server) -> None:
    server.installation.node.capacity |= {"max_sandboxes": 3}
    await server.created(name="one")
    snap = await made(server)
    answer = await fork(server, f"snapshots/{snap['id']}", count=3)
    assert (answer.status_code, error_of(answer)["code"]) == (429, "capacity_exceeded")
    await server.settle()
    assert len((await server.http.get("/v1/sandboxes?state=live")).json()["sandboxes"]) == 1
    await check_nothing_is_left(server)
    assert (await fork(server, f"snapshots/{snap['id']}", count=2)).status_code == 201


async def test_a_repeat_with_the_key_makes_nothing_more(server: Server) -> None:
    await server.created(name="one")
    headers = {"idempotency-key": "k"}
    for path, body in (("fork", {"count": 2}), ("snapshots", {"name": "base"})):
        first, second = [
            await server.http.post(f"/v1/sandboxes/one/{path}", json=body, headers=headers) for _ in range(2)
        ]
        assert (first.status_code, second.status_code) == (201, 201)
        assert second.headers["idempotency-replayed"] == "true"
        one, two = first.json(), second.json()
        if path == "fork":
            one, two = ([box["sandbox"] for box in answer["sandboxes"]] for answer in (one, two))
        assert one == two
    assert len((await server.http.get("/v1/sandboxes")).json()["sandboxes"]) == 3


# --- what is lost ---


async def test_the_files_of_a_lost_sandbox_are_kept_for_a_day(server: Server) -> None:
    sandbox = (await server.created(name="one", labels={"a": "b"}))["id"]
    node, clock = server.installation.node, server.installation.clock
    await node.die(sandbox)
    await server.settle()
    assert (await server.get("one"))["state"] == "lost"
    (kept,) = (await server.http.get(f"/v1/snapshots?sandbox={sandbox}")).json()["snapshots"]
    assert (kept["state"], kept["memory"], kept["created_by"]) == ("ready", False, "system")
    assert kept["reason"] == "kept when its sandbox was lost: killed by the kernel: out of memory"
    box = await server.created(snapshot=kept["id"])
    assert (node.begun_with[box["id"]], box["labels"]) == ((kept["id"], False), {"a": "b"})
    await check_nothing_is_left(server)
    clock.advance(86000)
    await server.settle()
    assert len((await server.http.get("/v1/snapshots")).json()["snapshots"]) == 1
    clock.advance(500)
    await server.settle()
    assert (await server.http.get("/v1/snapshots")).json()["snapshots"] == []
    await check_nothing_is_left(server)


async def test_what_was_left_undone_when_it_was_lost_is_done_later(installation: Installation) -> None:
    """The server was ended between the word that it is lost and the keeping of its files."""
    async with installation.serve(stop_grace_s=0) as server:
        sandbox = (await server.created(name="one"))["id"]
        installation.node.gates["snapshot"].close()
        await installation.node.die(sandbox)
        await server.plane.reconciler.take_changes([installation.node.sandboxes[sandbox]])
        await until(lambda: installation.node.gates["snapshot"].waiting)
    installation.node.gates["snapshot"].open()
    async with installation.serve() as server:
        assert (await server.get("one"))["state"] == "lost"
        await server.settle()
        assert len((await server.http.get("/v1/snapshots")).json()["snapshots"]) == 1
        await check_nothing_is_left(server)


async def test_what_cannot_be_kept_is_lost_all_the_same(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    server.installation.node.errors["snapshot"] = CapacityExceeded("cannot save it", "no room")
    await server.installation.node.die(sandbox)
    await server.settle()
    assert (await server.get("one"))["state"] == "lost"
    assert (await server.http.get("/v1/snapshots")).json()["snapshots"] == []
    await check_nothing_is_left(server)


async def test_what_cannot_be_kept_now_is_kept_when_it_can(server: Server) -> None:
    """Its node is away just as it dies: nothing is removed before it was asked again."""
    sandbox = (await server.created(name="one"))["id"]
    node = server.installation.node
    node.errors["snapshot"] = Unavailable("cannot reach it", "down", code="node_unavailable")
    await node.die(sandbox)
    await server.settle()
    assert (await server.get("one"))["state"] == "lost"
    assert sandbox in node.sandboxes
    node.errors.pop("snapshot", None)
    await server.settle()
    assert len((await server.http.get("/v1/snapshots")).json()["snapshots"]) == 1
    await check_nothing_is_left(server)


async def test_what_cannot_be_kept_for_long_is_given_up(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    node = server.installation.node
    node.errors["snapshot"] = Unavailable("cannot reach it", "down", code="node_unavailable")
    await node.die(sandbox)
    await server.settle()
    server.installation.clock.advance(601)
    node.errors["snapshot"] = Unavailable("cannot reach it", "down", code="node_unavailable")
    await server.settle()
    await check_nothing_is_left(server)


# --- what a tenant could try ---


async def test_another_workspaces_sandbox_is_neither_kept_nor_begun_with(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    snap = await made(server, name="base")
    headers = await other_key(server)
    for ref in (sandbox, "one"):
        for verb in ("snapshots", "fork", "pause", "resume"):
            answer = await server.http.post(f"/v1/sandboxes/{ref}/{verb}", json={}, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (404, "sandbox_not_found")
    for ref in (snap["id"], "base", snap["id"][:5]):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork")):
            body = {} if method == "POST" else None
            answer = await server.http.request(method, f"/v1/snapshots/{ref}{path}", json=body, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (404, "snapshot_not_found")
        answer = await server.http.post("/v1/sandboxes", json={"snapshot": ref}, headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "snapshot_not_found")
    assert (await server.http.get("/v1/snapshots", headers=headers)).json() == {"snapshots": []}
    answer = await server.http.get(f"/v1/snapshots?sandbox={sandbox}", headers=headers)
    assert error_of(answer)["code"] == "sandbox_not_found"
    assert server.installation.node.calls["create"] == 1
    await check_nothing_is_left(server)


async def test_a_forks_inner_snapshot_is_nobodys(server: Server) -> None:
    """Not even its own workspace can begin with it, or remove it from under the creates."""
    await server.created(name="one")
    node = server.installation.node
    node.create_gate.clear()
    call = asyncio.create_task(fork(server, "sandboxes/one", count=2))
    await until(lambda: node.calls["create"] >= 2)
    (inner,) = node.snapshots_kept
    for method, path, body in (
        ("DELETE", f"/v1/snapshots/{inner}", None),
        ("GET", f"/v1/snapshots/{inner}", None),
        ("POST", "/v1/sandboxes", {"snapshot": inner}),
    ):
        answer = await server.http.request(method, path, json=body)
        assert error_of(answer)["code"] == "snapshot_not_found"
    await server.settle()  # nor does the reconciler take it for one that was left
    assert list(node.snapshots_kept) == [inner]
    node.create_gate.set()
    assert (await call).status_code == 201


async def test_forks_do_not_pass_the_quota(server: Server) -> None:
    await server.created(name="one")
    snap = await made(server)
    await limit(server, max_sandboxes=4)
    for path in ("sandboxes/one", f"snapshots/{snap['id']}"):
        answer = await fork(server, path, count=4)
        assert (answer.status_code, error_of(answer)["code"]) == (429, "limit_reached")
    assert server.installation.node.calls["create"] == 1
    answers = await asyncio.gather(*(fork(server, "sandboxes/one", count=2) for _ in range(4)))
    await server.settle()
    live = (await server.http.get("/v1/sandboxes?state=live")).json()["sandboxes"]
    assert len(live) == 1 + 2 * sum(answer.status_code == 201 for answer in answers) <= 4
    await check_nothing_is_left(server)


@pytest.mark.parametrize("count", [0, 65, 10**9])
async def test_a_fork_has_a_size(server: Server, count: int) -> None:
    await server.created(name="one")
    assert (await fork(server, "sandboxes/one", count=count)).status_code == 422


async def test_snapshots_do_not_pass_the_quota(server: Server) -> None:
    await server.created(name="one")
    await limit(server, max_snapshots=2)
    answers = await asyncio.gather(*(snapshot(server) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 429, 429, 429]
    assert {error_of(answer)["details"]["limit"] for answer in answers if answer.status_code == 429} == {"snapshots"}
    await check_nothing_is_left(server)


async def test_snapshots_do_not_take_promised_disk(server: Server) -> None:
    server.installation.node.capacity |= {"disk_mib": 20_000}
    await server.created(name="one", memory_mib=2048, disk_mib=8192)
    await server.created(disk_mib=4096)
    answer = await snapshot(server)
    assert (answer.status_code, error_of(answer)["code"]) == (429, "capacity_exceeded")
    assert (await server.http.get("/v1/snapshots")).json()["snapshots"] == []
    await check_nothing_is_left(server)


async def test_what_a_dead_server_left_on_the_node_is_removed(installation: Installation) -> None:
    async with installation.serve() as server:
        sandbox = (await server.created(name="one"))["id"]
        await made(server)
        node = installation.node
        stray = next(iter(node.snapshots_kept.values())).model_copy(update={"id": "z" * 20})
        node.snapshots_kept[stray.id] = stray
        await server.settle()
        assert len(node.snapshots_kept) == 2
        installation.clock.advance(31)
        await server.settle()
        await check_nothing_is_left(server)
        assert sandbox in node.sandboxes


async def test_a_snapshot_that_the_node_lost_says_so(server: Server) -> None:
    await server.created(name="one")
    snap = await made(server, name="base")
    server.installation.node.snapshots_kept.clear()
    await server.settle()
    told = (await server.http.get(f"/v1/snapshots/{snap['id']}")).json()
    assert (told["state"], told["reason"]) == ("failed", "the node has it no more")
