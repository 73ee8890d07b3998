"""What is kept of the steps of builds: whose it is, what bounds it, and when it goes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import insert

from control_plane import Server, check_nothing_is_left
from cpuos.errors import PlatformError
from cpuos.server.db import layers as records
from cpuos.server.db.models import Workspace
from cpuos.server.db.sandboxes import row_of
from cpuos.server.templates.active import Active
from cpuos.server.templates.layers import UNUSED_KEPT, Layers
from cpuos.types.template import Build, BuildState, TemplateBuild

PARENT = "sha256:base"


def layers_of(server: Server, *, mib: int = 100) -> Layers:
    plane = server.plane
    return Layers(database=plane.database, snapshots=plane.snapshots, clock=plane.clock, workspace_mib=mib)


async def active(server: Server, *, workspace: str = "default", parent: str = PARENT, **body: Any) -> Active:
    sandbox = await server.created(**body)
    async with server.plane.database.read() as connection:
        row = await row_of(connection, sandbox["id"])
    build = Build(id="b", name="x", state=BuildState.RUNNING, created_at=server.plane.clock())
    request = TemplateBuild(name="x", run=["true"])
    return Active(
        build=build, request=request, workspace=workspace, actor="me", parent_digest=parent, network="", sandbox=row
    )


async def kept(server: Server, layers: Layers, *keys: str, workspace: str = "default") -> list[str]:
    return [key for key in keys if (await layers.find(workspace, [key]))[0]]


async def on_node(server: Server) -> int:
    return len(await server.installation.node.snapshots())


async def test_the_longest_run_of_steps_is_found(server: Server) -> None:
    layers = layers_of(server)
    work = await active(server)
    assert await layers.find("default", ["a", "b", "c"]) == (0, None)
    await layers.keep(work, "a")
    await layers.keep(work, "b")
    number, first = await layers.find("default", ["a", "b", "c"])
    assert (number, first is not None and first.memory) == (2, False)
    assert (await layers.find("default", ["other", "b"]))[0] == 2, "a key tells of all steps before it"
    assert (await layers.find("default", ["a", "other"]))[0] == 1
    # The same again is not kept twice, and the reconciler leaves what is kept alone.
    await layers.keep(work, "a")
    assert await on_node(server) == 2
    await server.settle()
    assert await on_node(server) == 2
    assert (await server.http.get("/v1/snapshots")).json()["snapshots"] == [], "they are nobody's to see"


async def test_another_workspace_neither_finds_nor_replaces_them(server: Server) -> None:
    layers = layers_of(server)
    async with server.plane.database.write() as connection:
        await connection.execute(insert(Workspace).values(id="other", name="other", created_at=server.plane.clock()))
    work = await active(server)
    await layers.keep(work, "a")
    _, mine = await layers.find("default", ["a"])
    assert mine is not None
    assert await layers.find("other", ["a"]) == (0, None)
    await layers.keep(await active(server, workspace="other"), "a")
    _, theirs = await layers.find("other", ["a"])
    _, still = await layers.find("default", ["a"])
    assert theirs is not None
    assert still is not None
    assert (still.id, theirs.id != mine.id) == (mine.id, True)
    await layers.prune("other")
    assert await kept(server, layers, "a") == ["a"]


async def test_the_longest_unused_go_first(server: Server) -> None:
    layers = layers_of(server, mib=2)  # a snapshot of the fake node has one MiB
    work = await active(server)
    for key in ("a", "b"):
        await layers.keep(work, key)
        server.installation.clock.advance(1)
    await layers.find("default", ["a"])
    server.installation.clock.advance(1)
    await layers.keep(work, "c")
    assert await kept(server, layers, "a", "b", "c") == ["a", "c"]
    await server.settle()
    assert await on_node(server) == 2, "what was let go is gone from the node too"


async def test_none_are_kept_where_none_may_be(server: Server) -> None:
    layers = layers_of(server, mib=0)
    await layers.keep(await active(server), "a")
    assert await on_node(server) == 0


async def test_they_go_when_unused_and_with_their_parent(server: Server) -> None:
    layers = layers_of(server)
    await layers.keep(await active(server), "of base")
    await layers.keep(await active(server, parent="sha256:gone"), "of none")
    await layers.tidy(installed=[PARENT])
    assert await kept(server, layers, "of base", "of none") == ["of base"]
    server.installation.clock.advance((UNUSED_KEPT + timedelta(hours=1)).total_seconds())
    await layers.tidy(installed=[PARENT])
    assert await kept(server, layers, "of base") == []
    await server.settle()
    assert await on_node(server) == 0


async def test_a_build_goes_on_where_nothing_can_be_kept(server: Server, monkeypatch: Any) -> None:
    layers = layers_of(server)
    work = await active(server)

    async def full(*_: object, **__: object) -> None:
        raise PlatformError("cannot save", "the volume is full", code="disk_full")

    monkeypatch.setattr(server.installation.node, "snapshot", full)
    await layers.keep(work, "a")
    monkeypatch.undo()
    assert await kept(server, layers, "a") == []
    async with server.plane.database.read() as connection:
        assert not await records.has_layer(connection, "default", "a")
    await layers.keep(work, "a")
    assert await kept(server, layers, "a") == ["a"], "the next build keeps it"
    await server.kill(work.row.id)
    await layers.prune("default")
    await server.settle()
    await check_nothing_is_left(server)
    assert await on_node(server) == 0
