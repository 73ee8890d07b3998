"""What steps of builds have left, in `df` and `prune`: told with its size, and removed by age, never from under a
build. It goes whole, whenever the server ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_api_template_layers import active, kept, layers_of, on_node
from test_api_templates import other_workspace

from control_plane import Installation, Server, check_nothing_is_left, until
from cpuos.server import snapshots as verbs
from cpuos.server.snapshots import UNOWNED_GRACE
from cpuos.types.template import TemplateBuild

HOUR = 3600.0
RECIPE = {"run": ["true"]}


async def stored(server: Server) -> dict[str, dict[str, Any]]:
    nodes = (await server.http.get("/v1/storage")).json()["nodes"]
    return {item["name"]: item for node in nodes for item in node["items"]}


async def pruned(server: Server, **fields: Any) -> list[str]:
    answer = await server.http.post("/v1/storage/prune", json=fields)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["freed_bytes"] == sum(item["real_bytes"] for item in told["items"])
    return [item["name"] for item in told["items"]]


async def layer_ids(server: Server) -> list[str]:
    return [name for name, item in (await stored(server)).items() if item["kind"] == "build_layer"]


async def test_they_are_told_with_size_and_last_use(server: Server) -> None:
    work = await active(server)
    await layers_of(server).keep(work, "a")
    mine = (await server.http.post(f"/v1/sandboxes/{work.row.id}/snapshots", json={})).json()["id"]
    items = await stored(server)
    assert items[mine]["kind"] == "snapshot"
    (layer,) = [item for item in items.values() if item["kind"] == "build_layer"]
    assert (layer["real_bytes"], layer["apparent_bytes"], layer["needed"]) == (1 << 20, 1 << 30, True)
    assert layer["state"].startswith("used 2026-01-01")
    server.installation.clock.advance(25 * HOUR)
    old = (await stored(server))[layer["name"]]
    assert not old["needed"]
    assert "2026-01-01" in old["why"]


async def test_prune_takes_those_that_were_not_used_for_so_long(server: Server) -> None:
    layers, clock = layers_of(server), server.installation.clock
    work = await active(server)
    await layers.keep(work, "old")
    (old,) = await layer_ids(server)
    snapshot = (await server.http.post(f"/v1/sandboxes/{work.row.id}/snapshots", json={})).json()["id"]
    clock.advance(25 * HOUR)
    await layers.keep(work, "young")
    assert await pruned(server) == [old]
    assert await on_node(server) == 3, "only what would go was asked for"
    assert await pruned(server, dry_run=False) == [old]
    assert await kept(server, layers, "old", "young") == ["young"]
    assert await on_node(server) == 2
    assert await pruned(server, dry_run=False) == []
    assert await pruned(server, layers_unused_s=HOUR) == []
    clock.advance(2 * HOUR)
    (young,) = await layer_ids(server)
    assert await pruned(server, dry_run=False, layers_unused_s=HOUR) == [young]
    assert [facts.id for facts in await server.installation.node.snapshots()] == [snapshot]
    await check_nothing_is_left(server)


async def test_prune_is_of_all_workspaces_and_of_the_operator(server: Server) -> None:
    headers = await other_workspace(server)
    layers = layers_of(server)
    await layers.keep(await active(server), "a")
    await layers.keep(await active(server, workspace="other"), "a")
    assert len(await pruned(server, dry_run=False, layers_unused_s=0)) == 2
    assert await on_node(server) == 0
    refused = await server.http.post("/v1/storage/prune", json={"layers_unused_s": -1}, headers=headers)
    assert refused.status_code == 422


async def test_none_goes_from_under_a_build(server: Server) -> None:
    """It is held from before it is looked for until the build's end."""
    node, builder = server.installation.node, server.plane.builder
    work = await active(server, template="base")
    policy = await server.plane.networks.workspace_policy("default")
    work.request = TemplateBuild(name="mine", **RECIPE)
    work.network = policy.model_dump_json()
    (key,) = work.layers
    await builder.layers.keep(work, key)
    (layer,) = await layer_ids(server)
    door = asyncio.Event()

    async def at_work(active: Any, image: str, **parts: Any) -> Any:
        await door.wait()
        raise OSError("it ends here")

    builder._runner.work = at_work  # type: ignore[method-assign]
    calls = node.calls["create"]
    node.create_gate.clear()
    begun = asyncio.create_task(server.http.post("/v1/builds", json={"name": "mine", **RECIPE}))
    await until(lambda: node.calls["create"] > calls)
    assert await pruned(server, dry_run=False, layers_unused_s=0) == [], "its sandbox is being made from it"
    assert (await stored(server))[layer]["state"] == "in use"
    node.create_gate.set()
    build = (await begun).json()["build"]
    assert node.begun_with[build["sandbox"]][0] == layer
    assert await pruned(server, dry_run=False, layers_unused_s=0) == [], "the next of its kind begins with it too"
    door.set()
    await until(lambda: not builder._active)
    assert await pruned(server, dry_run=False, layers_unused_s=0) == [layer]
    await check_nothing_is_left(server)


async def test_one_that_the_node_reads_stays_and_is_not_told_as_gone(server: Server) -> None:
    from cpuos.errors import Conflict

    node, layers = server.installation.node, layers_of(server)
    await layers.keep(await active(server), "a")
    (layer,) = await layer_ids(server)
    node.errors["delete_snapshot"] = Conflict("cannot remove snapshot: it is read")
    assert await pruned(server, dry_run=False, layers_unused_s=0) == []
    assert await kept(server, layers, "a") == [], "nobody begins with it any more"
    node.errors.clear()
    await server.settle()
    assert layer not in node.snapshots_kept


class Door:
    """A step that is never done: the server ends in it."""

    def __init__(self) -> None:
        self.come = asyncio.Event()

    async def __call__(self, *args: Any, **options: Any) -> Any:
        self.come.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("step", ["let go", "node asked", "node has done it", "record"])
async def test_a_server_that_ends_in_a_step_leaves_no_half(
    installation: Installation, monkeypatch: Any, step: str
) -> None:
    door, node = Door(), installation.node
    async with installation.serve(stop_grace_s=0.01) as server:
        await layers_of(server).keep(await active(server), "a")
        (layer,) = await layer_ids(server)
        remove = node.delete_snapshot

        async def done_and_not_told(snapshot: str) -> None:
            await remove(snapshot)
            await door()

        with monkeypatch.context() as patched:
            if step == "let go":
                patched.setattr(server.plane.snapshots, "tidy", door)
            elif step == "record":
                patched.setattr(verbs, "remove_snapshot", door)
            else:
                patched.setattr(node, "delete_snapshot", door if step == "node asked" else done_and_not_told)
            asked = asyncio.create_task(
                server.http.post("/v1/storage/prune", json={"dry_run": False, "layers_unused_s": 0})
            )
            await door.come.wait()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    async with installation.serve() as server:
        assert await kept(server, layers_of(server), "a") == []
        installation.clock.advance(1)
        await server.settle()
        installation.clock.advance(UNOWNED_GRACE.total_seconds())
        await server.settle()
        assert layer not in node.snapshots_kept
        assert await stored(server) == {}
        assert await pruned(server, dry_run=False, layers_unused_s=0) == []
        await check_nothing_is_left(server)
