"""Equal builds at once: one works, the others wait; who goes on when that one comes to nothing, and with what. Each
order of the ends is held by doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from control_plane import Installation, Server, check_nothing_is_left, error_of, until
from cpuos.errors import CapacityExceeded, CpuosError, LimitReached, PlatformError, SandboxGone
from cpuos.server.db import templates as records
from cpuos.server.templates.active import Active
from cpuos.server.templates.failures import build_failed, too_large
from cpuos.types.template import Build, BuildState, BuildStep, TemplateInfo

RECIPE: dict[str, Any] = {"run": ["true"]}
FILES = [{"path": "/opt/a", "sha256": "0" * 64, "size": 1}]


class Work:
    """Stands where a build works in its sandbox: each waits at its door until it is told how it ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ends: dict[str, asyncio.Future[None]] = {}
        self.begun: list[str] = []
        server.plane.builder._runner.work = self  # type: ignore[method-assign, assignment]

    async def __call__(self, active: Active, image: str, *, known: Any, undo: AsyncExitStack) -> TemplateInfo:
        await active.uploaded.wait()
        self.begun.append(active.build.id)
        end = self._ends[active.build.id] = asyncio.get_running_loop().create_future()
        await end
        self._server.installation.node.built[image] = b"image"
        await self._server.plane.refresh_nodes()
        facts = {"digest": "sha256:b", "size_bytes": 5, "parent": "base"}
        return TemplateInfo(name=active.build.name, key=active.key, **facts)

    async def has_begun(self, build: str) -> None:
        await until(lambda: build in self._ends)

    async def end(self, build: str, error: CpuosError | None = None) -> None:
        await self.has_begun(build)
        if error is None:
            self._ends[build].set_result(None)
        else:
            self._ends[build].set_exception(error)


@pytest.fixture
async def work(server: Server) -> AsyncIterator[Work]:
    yield Work(server)
    await until(lambda: not server.plane.builder._active)
    await until(lambda: not server.plane.builder._flights._flights)
    await check_nothing_is_left(server)


async def build(server: Server, name: str, **fields: Any) -> str:
    answer = await server.http.post("/v1/builds", json={"name": name, **RECIPE, **fields})
    assert answer.status_code == 201, answer.text
    return answer.json()["build"]["id"]


async def now(server: Server, build_id: str) -> dict[str, Any]:
    return (await server.http.get(f"/v1/builds/{build_id}")).json()


async def ended(server: Server, build_id: str) -> dict[str, Any]:
    async def end() -> dict[str, Any] | None:
        shown = await now(server, build_id)
        return shown if shown["state"] in ("ready", "failed") else None

    return await until(end)


async def cancel(server: Server, build_id: str) -> dict[str, Any]:
    return (await server.http.delete(f"/v1/builds/{build_id}")).json()


SHOWN = Build(id="b", name="x", state=BuildState.RUNNING, created_at="2026-01-01T00:00:00Z")


def failed_step(exit_code: int | None, step: str = "run 1") -> CpuosError:
    """As a command's end is told."""
    shown = SHOWN.model_copy(update={"steps": [BuildStep(name=step, text="true")]})
    error = build_failed(shown, step, "why", output="why")
    if exit_code is not None:
        error.details["exit_code"] = exit_code
    return error


async def test_what_one_makes_is_everybodys(server: Server, work: Work) -> None:
    first, second, third = [await build(server, name) for name in ("one", "two", "three")]
    await work.end(first)
    for number, one in enumerate((first, second, third)):
        shown = await ended(server, one)
        assert (shown["state"], shown["reused"]) == ("ready", number > 0)
    assert work.begun == [first]
    assert len(server.installation.node.built) == 1


async def test_the_next_goes_on_when_the_first_is_cancelled(server: Server, work: Work) -> None:
    """With files: it is told that it may upload now."""
    first, second, third, fourth = [await build(server, name, files=FILES) for name in ("one", "two", "three", "four")]
    assert (await now(server, second))["sandbox"] is None
    assert (await cancel(server, first))["error"]["what"] == "cannot build template 'one': it was cancelled"

    async def uploading() -> str | None:
        shown = [await now(server, one) for one in (second, third, fourth)]
        chosen = [one["id"] for one in shown if one["state"] == "uploading"]
        assert len(chosen) <= 1, "one of them works"
        return chosen[0] if chosen else None

    heir = await until(uploading)
    row = (await now(server, heir))["sandbox"]
    assert (await server.http.post(f"/v1/sandboxes/{row}/access")).status_code == 200, "its caller can upload"
    assert (await server.http.patch(f"/v1/builds/{heir}", json={"uploaded": True})).json()["state"] == "running"
    await work.end(heir)
    shown = {one: await ended(server, one) for one in (second, third, fourth)}
    assert {one["state"] for one in shown.values()} == {"ready"}
    assert [one for one in shown if not shown[one]["reused"]] == [heir]
    assert work.begun == [heir]
    assert (await now(server, first))["state"] == "failed"


@pytest.mark.parametrize("error", [None, failed_step(1)], ids=["made", "failed"])
async def test_one_that_ends_before_the_other_is_on_record_is_shared_too(
    server: Server, work: Work, monkeypatch: Any, error: CpuosError | None
) -> None:
    first = await build(server, "one")
    start, held, door = server.plane.builder._start, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> None:
        held.set()
        await door.wait()
        await start(*args)

    monkeypatch.setattr(server.plane.builder, "_start", slow)
    waiting = asyncio.create_task(build(server, "two"))
    await held.wait()
    await work.end(first, error)
    await until(lambda: not server.plane.builder._flights._flights)
    door.set()
    second = await ended(server, await waiting)
    assert second["state"] == ("ready" if error is None else "failed")
    assert work.begun == [first]


OWN = {
    "its sandbox is gone": SandboxGone("cannot exec", "its node is dead"),
    "a fault of the platform": PlatformError("cannot build template", "a disk is broken"),
    "its time is up": LimitReached("cannot build", "its time ended", details={"limit": "build_time"}),
    "a command that was killed": failed_step(None),
    "what was uploaded": failed_step(1, "files"),
    "what the registry had": failed_step(1, "fetch"),
}


@pytest.mark.parametrize("error", OWN.values(), ids=OWN)
async def test_the_next_goes_on_when_the_first_dies(server: Server, work: Work, error: CpuosError) -> None:
    first, second, third = [await build(server, name) for name in ("one", "two", "three")]
    await work.end(first, error)
    assert (await ended(server, first))["state"] == "failed"
    await until(lambda: len(work.begun) == 2)
    heir = work.begun[1]
    await work.end(heir)
    for one in (second, third):
        assert (await ended(server, one))["state"] == "ready"
    assert work.begun == [first, heir]


@pytest.mark.parametrize("error", [failed_step(1), too_large(SHOWN, "why")], ids=["a command failed", "too large"])
async def test_what_is_wrong_with_the_recipe_is_wrong_for_all(server: Server, work: Work, error: CpuosError) -> None:
    first = await build(server, "one")
    second = await build(server, "two", timeout_s=60)
    await work.end(first, error)
    mine, other = await ended(server, first), await ended(server, second)
    assert (mine["state"], other["state"]) == ("failed", "failed")
    assert first in other["error"]["what"]
    assert mine["error"]["why"] in other["error"]["why"]
    assert other["error"]["details"] == {**mine["error"]["details"], "step": other["error"]["details"]["step"]}
    assert work.begun == [first]


@pytest.mark.parametrize("size", [{"memory_mib": 4096}, {"cpu": 1}, {"disk_mib": 4096}])
async def test_a_larger_one_does_not_fail_for_a_smaller(server: Server, work: Work, size: dict[str, int]) -> None:
    first, second = await build(server, "one"), await build(server, "two", **size)
    await work.end(first, failed_step(1))
    await work.end(second)
    assert (await ended(server, second))["state"] == "ready"
    assert work.begun == [first, second]


async def test_each_tries_for_itself_when_there_was_no_room(server: Server, work: Work) -> None:
    node = server.installation.node
    node.create_gate.clear()
    first = asyncio.create_task(server.http.post("/v1/builds", json={"name": "one", **RECIPE}))
    await server.node_called()
    second, third = await build(server, "two"), await build(server, "three")
    node.create_error = CapacityExceeded("cannot create sandbox: full", "no memory", details={"resource": "memory"})
    node.create_gate.set()
    assert error_of(await first)["code"] == "capacity_exceeded"
    for one in (second, third):
        assert (await ended(server, one))["error"]["code"] == "capacity_exceeded"
    assert work.begun == []
    node.create_error = None
    again = await build(server, "again")
    await work.end(again)
    assert (await ended(server, again))["state"] == "ready"


async def test_one_that_waits_can_be_cancelled(server: Server, work: Work) -> None:
    first, second, third = [await build(server, name) for name in ("one", "two", "three")]
    told = (await cancel(server, second))["error"]
    assert told["details"]["step"] == "wait"
    await work.end(first)
    assert (await ended(server, first))["state"] == "ready"
    assert (await ended(server, third))["state"] == "ready"


async def test_one_that_takes_over_can_be_cancelled_while_it_gets_its_sandbox(server: Server, work: Work) -> None:
    node = server.installation.node
    first, second = await build(server, "one"), await build(server, "two")
    await work.has_begun(first)
    node.create_gate.clear()
    calls = node.calls["create"]
    await cancel(server, first)
    await until(lambda: node.calls["create"] > calls)
    third = await build(server, "three")
    cancelled = asyncio.create_task(cancel(server, second))
    await asyncio.sleep(0)
    node.create_gate.set()
    assert (await cancelled)["state"] == "failed"
    await work.end(third)
    assert (await ended(server, third))["state"] == "ready"
    assert work.begun == [first, third]


async def test_a_wait_has_its_time(server: Server, work: Work) -> None:
    first, second = await build(server, "one"), await build(server, "two", timeout_s=0.05)
    error = (await ended(server, second))["error"]
    assert error["details"] == {"limit": "build_time", "step": "wait"}
    await work.end(first)
    assert (await ended(server, first))["state"] == "ready"


async def test_what_was_made_and_is_gone_again_is_made_anew(server: Server, work: Work) -> None:
    first, second = await build(server, "one"), await build(server, "two")
    await work.has_begun(first)
    server.plane.builder._names.images = set  # type: ignore[method-assign, assignment]
    await work.end(first)
    await work.end(second)
    assert (await ended(server, second))["state"] == "ready"
    del server.plane.builder._names.images
    assert work.begun == [first, second]


async def test_who_wants_it_fresh_waits_for_nobody(server: Server, work: Work) -> None:
    first, fresh, third = [await build(server, name, fresh=name == "two") for name in ("one", "two", "three")]
    await work.end(first, SandboxGone("cannot exec", "its node is dead"))
    assert (await ended(server, first))["state"] == "failed"
    assert (await now(server, third))["state"] == "running", "it waits for the one that was begun last"
    await work.end(fresh)
    assert [(await ended(server, one))["state"] for one in (fresh, third)] == ["ready", "ready"]
    assert work.begun == [first, fresh]


async def test_nobody_takes_over_from_a_server_that_stops(installation: Installation) -> None:
    async with installation.serve() as server:
        work = Work(server)
        first, second = await build(server, "one"), await build(server, "two")
        await work.has_begun(first)
    assert work.begun == [first]
    async with installation.serve() as server:
        for one in (first, second):
            assert (await ended(server, one))["state"] == "failed"
        await check_nothing_is_left(server)


async def test_a_build_that_is_not_on_record_lets_the_next_go_on(server: Server, work: Work, monkeypatch: Any) -> None:
    insert = records.insert_build
    held = asyncio.Event()

    async def broken(*args: Any, **options: Any) -> None:
        held.set()
        await until(lambda: second)
        raise OSError("the disk is full")

    second = ""
    monkeypatch.setattr(records, "insert_build", broken)
    first = asyncio.create_task(server.http.post("/v1/builds", json={"name": "one", **RECIPE}))
    await held.wait()
    monkeypatch.setattr(records, "insert_build", insert)
    waiting = asyncio.create_task(build(server, "two"))
    await until(lambda: server.plane.builder._active)
    second = "there"
    assert (await first).status_code == 500
    second = await waiting
    await work.end(second)
    assert (await ended(server, second))["state"] == "ready"
