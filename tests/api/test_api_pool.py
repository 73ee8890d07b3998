"""Creates take what a node has ready: each one once, none that does not fit, and the answer says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import update

from control_plane import Server, error_of
from cpuos.errors import PlatformError, Unavailable
from cpuos.server.db.models import Workspace
from cpuos.testing.waiting import until
from cpuos.types.node import PoolFacts, ReadySandbox

FIRST, SECOND = "a" * 20, "b" * 20
Offer = Callable[..., Awaitable[None]]


def ready(sandbox_id: str, **changes: object) -> ReadySandbox:
    values = {
        "template": "python",
        "template_digest": "sha256:python",
        "runtime": "gvisor",
        "cpu": 2,
        "memory_mib": 2048,
        "disk_mib": 8192,
        "max_processes": 512,
    }
    return ReadySandbox(id=sandbox_id, **(values | changes))


@pytest.fixture
def offer(server: Server) -> Offer:
    """Let the node have these ready, and the server hear of it."""

    async def tell(*sandboxes: ReadySandbox) -> None:
        node = server.installation.node
        node.ready = PoolFacts(seq=node.ready.seq + 1, ready=list(sandboxes))
        await server.plane.scheduler.follow_ready()

    return tell


async def test_a_create_takes_a_ready_one_and_says_so(server: Server, offer: Offer) -> None:
    await offer(ready(FIRST))
    made, other = await server.created(), await server.created()
    assert (made["id"], made["started_from"], made["state"]) == (FIRST, "pool", "running")
    assert (other["id"] == FIRST, other["started_from"]) == (False, "cold")
    assert await server.get(FIRST) == made
    entries = (await server.http.get("/v1/audit", params={"action": "sandbox.create"})).json()["entries"]
    told = {one["sandbox"]: one["detail"].get("started_from") for one in entries if one["phase"] == "outcome"}
    assert told == {FIRST: "pool", other["id"]: "cold"}


async def test_creates_at_once_never_get_the_same_one(server: Server, offer: Offer) -> None:
    await offer(ready(FIRST), ready(SECOND))
    made = await asyncio.gather(*(server.created() for _ in range(5)))
    assert len({one["id"] for one in made}) == 5
    assert sorted(one["started_from"] for one in made) == ["cold"] * 3 + ["pool"] * 2


async def test_one_given_away_is_not_given_again(server: Server, offer: Offer) -> None:
    await offer(ready(FIRST))
    await server.created()
    await offer(ready(FIRST), ready(SECOND))  # the node may not have heard of it yet
    assert (await server.created())["id"] == SECOND
    assert (await server.created())["started_from"] == "cold"


@pytest.mark.parametrize(
    "other",
    [
        {"template": "base"},
        {"template_digest": "sha256:older"},
        {"runtime": "firecracker"},
        {"cpu": 1},
        {"memory_mib": 1024},
        {"disk_mib": 4096},
        {"max_processes": 64},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_one_that_does_not_fit_is_left(server: Server, offer: Offer, other: dict[str, object]) -> None:
    await offer(ready(FIRST, **other))
    assert (await server.created())["id"] != FIRST


async def test_a_create_with_a_name_begins_cold(server: Server, offer: Offer) -> None:
    await offer(ready(FIRST))
    made = await server.created(name="mine")
    assert (made["id"] == FIRST, made["started_from"]) == (False, "cold")


async def test_a_create_that_was_refused_gives_it_back(server: Server, offer: Offer) -> None:
    await offer(ready(FIRST))
    async with server.plane.database.write() as connection:
        await connection.execute(update(Workspace).values(max_sandboxes=0))
    assert (await server.create()).status_code == 429
    async with server.plane.database.write() as connection:
        await connection.execute(update(Workspace).values(max_sandboxes=None))
    assert (await server.created())["id"] == FIRST


async def test_a_node_out_of_reach_has_nothing_ready(server: Server, offer: Offer) -> None:
    await offer(ready(FIRST))
    server.installation.node.reachable = False
    with pytest.raises(Unavailable):
        await server.plane.scheduler.follow_ready()
    server.installation.node.reachable = True
    assert (await server.created())["id"] != FIRST


async def test_the_running_server_hears_of_it(installation) -> None:
    installation.node.ready = PoolFacts(seq=1, ready=[ready(FIRST)])
    async with installation.serve(reconcile=True) as server:
        async with asyncio.timeout(30):
            while server.plane.scheduler._ready.seq != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert (await server.created())["id"] == FIRST


async def test_the_gateway_is_at_what_is_ready_and_leaves_what_is_gone(installation) -> None:
    node, gateway = installation.node, installation.gateway
    gateway.attached["c" * 20] = 1  # an earlier server knew it, and it went while no server ran
    node.ready = PoolFacts(seq=1, ready=[ready(FIRST), ready(SECOND)])
    async with installation.serve() as server:
        await server.plane.reconciler._ready.follow()
        await until(lambda: set(gateway.attached) == {FIRST, SECOND})
        assert (await server.created())["id"] == FIRST
        node.ready = PoolFacts(seq=2, ready=[])
        await server.plane.reconciler._ready.follow()
        await until(lambda: set(gateway.attached) == {FIRST})
        assert {"c" * 20, SECOND} <= gateway.forgotten
        assert FIRST not in gateway.forgotten


async def test_one_that_was_given_up_meanwhile_is_made_as_the_next_generation(server: Server, offer: Offer) -> None:
    gateway = server.installation.gateway
    await offer(ready(FIRST))
    server.installation.node.ready = PoolFacts()  # it has none any more
    made = await server.created()
    assert (made["id"], made["started_from"], made["state"]) == (FIRST, "cold", "running")
    assert FIRST in gateway.forgotten
    assert gateway.attached == {FIRST: 2}
    # What was said for the one that was ready may be heard late: it means nothing for this one.
    await gateway.detach(FIRST, reason="stopped", text="it was not made", generation=1)
    await gateway.forget(FIRST, generation=1)
    assert gateway.attached == {FIRST: 2}
    assert (await server.get(FIRST))["state"] == "running"


async def test_one_that_was_given_up_and_fails_then_leaves_nothing(server: Server, offer: Offer) -> None:
    node, gateway = server.installation.node, server.installation.gateway
    await offer(ready(FIRST))
    node.ready = PoolFacts()
    node.create_error = PlatformError("cannot create sandbox", "a disk broke")
    answer = await server.create()
    assert (answer.status_code, error_of(answer)["why"]) == (500, "a disk broke")
    assert (await server.get(FIRST))["state"] == "failed"
    assert (gateway.attached, node.sandboxes) == ({}, {})
    assert (await server.http.get("/v1/capacity")).json()["sandboxes"]["reserved"] == 0


async def test_one_that_was_given_up_may_be_killed_as_it_begins_anew(server: Server, offer: Offer) -> None:
    node = server.installation.node
    await offer(ready(FIRST))
    node.ready = PoolFacts()
    node.create_gate.clear()
    creating = asyncio.create_task(server.create())
    await until(lambda: node.calls["create"] == 1)
    killing = asyncio.create_task(server.http.delete(f"/v1/sandboxes/{FIRST}"))
    await until(lambda: node.fenced)
    node.create_gate.set()
    answer = await creating
    assert (answer.status_code, error_of(answer)["code"]) in ((410, "sandbox_stopped"), (410, "sandbox_lost"))
    assert (await killing).status_code < 300
    assert (await server.get(FIRST))["state"] == "stopped"
    assert node.sandboxes == {}


async def test_one_that_another_server_was_given_is_left_to_it(server: Server, offer: Offer) -> None:
    await offer(ready(FIRST))
    theirs = await server.created()
    server.plane.scheduler._ready._picked.clear()  # as another server, which has not heard of it
    server.plane.scheduler.release(FIRST)
    await offer(ready(FIRST), ready(SECOND))
    made = await server.created()
    assert (theirs["id"], made["id"], made["started_from"]) == (FIRST, SECOND, "pool")
    assert (await server.get(FIRST))["state"] == "running"
