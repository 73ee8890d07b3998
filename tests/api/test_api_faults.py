"""A fault at each step of each verb: the answer says so, and after a restart nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from control_plane import FakeGateway, FakeNode, Installation, Server, check_nothing_is_left, error_of
from cpuos.errors import Unavailable
from cpuos.server.db.database import Database


class Faults:
    """Counts the outside steps (transactions, calls to node and gateway) and breaks one of them."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.at: int | None = None
        self.after = False
        self.cuts = False
        """The step does not break but never ends: the server is ended there."""
        self.cut = asyncio.Event()

    def arm(self, at: int, *, after: bool, cuts: bool = False) -> None:
        self.steps, self.at, self.after, self.cuts = [], at, after, cuts

    def disarm(self) -> None:
        self.at = None

    async def before(self, name: str) -> bool:
        """Whether this step has to break when it is done."""
        self.steps.append(name)
        broken = len(self.steps) - 1 == self.at
        if broken and not self.after:
            await self.hit(name)
        return broken

    async def hit(self, name: str) -> None:
        if self.cuts:
            self.cut.set()
            await asyncio.Event().wait()
        raise fault(name)


def fault(name: str) -> Exception:
    if name == "write":
        return OSError("disk full")
    return Unavailable("cannot reach it", "injected", code="node_unavailable")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    injected = Faults()
    write = Database.write

    @asynccontextmanager
    async def broken_write(self: Database) -> AsyncIterator[Any]:
        late = await injected.before("write")
        async with write(self) as connection:
            yield connection
        if late:
            await injected.hit("write")

    def breakable(kind: type, name: str) -> None:
        method: Callable[..., Any] = getattr(kind, name)

        async def call(self: Any, *arguments: Any, **options: Any) -> Any:
            late = await injected.before(name)
            result = await method(self, *arguments, **options)
            if late:
                await injected.hit(name)
            return result

        monkeypatch.setattr(kind, name, call)

    monkeypatch.setattr(Database, "write", broken_write)
    for name in ("create", "delete", "pause", "resume", "settle", "repause", "snapshot", "delete_snapshot"):
        breakable(FakeNode, name)
    for name in ("attach", "detach", "forget", "suspend"):
        breakable(FakeGateway, name)
    return injected


async def create(server: Server) -> Any:
    return await server.create(key="k", name="one")


async def kill(server: Server) -> Any:
    return await server.kill("one")


async def die(server: Server) -> None:
    await server.installation.node.die(next(iter(server.installation.node.sandboxes)))
    await server.settle()


async def expire(server: Server) -> None:
    server.installation.clock.advance(901)
    await server.settle()


async def pause(server: Server) -> Any:
    return await server.http.post("/v1/sandboxes/one/pause")


async def resume(server: Server) -> Any:
    return await server.http.post("/v1/sandboxes/one/resume")


async def snapshot(server: Server) -> Any:
    return await server.http.post("/v1/sandboxes/one/snapshots", json={"name": "snap"})


async def fork(server: Server) -> Any:
    return await server.http.post("/v1/sandboxes/one/fork", json={"count": 1})


async def remove(server: Server) -> Any:
    return await server.http.delete("/v1/snapshots/snap")


VERBS = {
    **{"create": create, "kill": kill, "die": die, "expire": expire},
    **{"pause": pause, "resume": resume, "snapshot": snapshot, "fork": fork, "remove": remove},
}
BEFORE = {"resume": [pause], "remove": [snapshot]}
STEPS = {
    "create": ["write", "write", "create", "attach", "write", "write"],
    "kill": ["write", "write", "detach", "delete", "write", "write"],
    "die": ["write", "write", "detach", "write", "snapshot", "write", "delete"],
    "expire": ["write", "write", "detach", "delete", "write"],
    "pause": ["write", "write", "suspend", "pause", "write", "write"],
    "resume": ["write", "write", "resume", "attach", "settle", "write", "write"],
    "snapshot": ["write", "write", "write", "suspend", "snapshot", "attach", "write", "write", "write"],
    "remove": ["write", "write", "delete_snapshot", "write", "write"],
    "fork": [
        *["write", "write", "write", "write", "suspend", "snapshot", "attach", "write", "write"],
        *["write", "create", "attach", "write", "write", "delete_snapshot", "write", "write"],
    ],
}
ENDS = {
    "kill": ["stopped", "running"],
    "die": ["lost"],
    "pause": ["running", "paused"],
    "resume": ["running", "paused"],
    "snapshot": ["running"],
    "remove": ["running"],
    "fork": ["running"],
}


async def begin(server: Server, verb: str) -> None:
    if verb != "create":
        await server.created(name="one", timeout_s=900 if verb in ("kill", "die", "expire") else 1e6)
    for step in BEFORE.get(verb, []):
        assert (await step(server)).status_code < 300


@pytest.mark.parametrize("after", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize(
    ("verb", "at"),
    [(verb, at) for verb in ("pause", "resume", "snapshot", "fork", "remove") for at in range(len(STEPS[verb]))],
)
async def test_a_server_that_ends_there(
    installation: Installation, faults: Faults, verb: str, at: int, after: bool
) -> None:
    """Killed between any two steps: the next start brings all that is on record to a state that is true."""
    async with installation.serve(stop_grace_s=0) as server:
        await begin(server, verb)
        faults.arm(at, after=after, cuts=True)
        call = asyncio.create_task(VERBS[verb](server))
        await faults.cut.wait()
    faults.disarm()
    with suppress(Exception, asyncio.CancelledError):
        await call
    async with installation.serve() as server:
        for _ in range(3):
            await server.settle()
            installation.clock.advance(301)
        await check_nothing_is_left(server)
        assert (await server.get("one"))["state"] in ENDS[verb]


async def came_true(server: Server, verb: str, answer: Any) -> bool:
    """What was said to be done is done, whatever came after."""
    match verb:
        case "pause" | "resume" | "kill":
            return (await server.get("one"))["state"] == answer.json()["state"]
        case "snapshot":
            return (await server.http.get("/v1/snapshots/snap")).json()["state"] == "ready"
        case "remove":
            return (await server.http.get("/v1/snapshots/snap")).status_code == 404
        case "fork":
            made = [one["sandbox"]["id"] for one in answer.json()["sandboxes"]]
            return len(made) == 1 and {(await server.get(one))["state"] for one in made} <= {"running", "stopped"}
    return True


@pytest.mark.parametrize("verb", VERBS)
async def test_the_steps_are_these(installation: Installation, faults: Faults, verb: str) -> None:
    async with installation.serve() as server:
        await begin(server, verb)
        faults.arm(-1, after=False)
        await VERBS[verb](server)
        assert faults.steps == STEPS[verb]


@pytest.mark.parametrize("after", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize(("verb", "at"), [(verb, at) for verb in VERBS for at in range(len(STEPS[verb]))])
async def test_fault(installation: Installation, faults: Faults, verb: str, at: int, after: bool) -> None:
    async with installation.serve(stop_grace_s=0) as server:
        await begin(server, verb)
        faults.arm(at, after=after)
        answer = await VERBS[verb](server)
        faults.disarm()
        if answer is not None and answer.status_code >= 400:
            assert error_of(answer)["what"].startswith("cannot ")
            assert "disk full" not in answer.text
    async with installation.serve() as server:
        for _ in range(3):
            await server.settle()
            installation.clock.advance(301)
        await check_nothing_is_left(server)
        if verb != "create":
            assert (await server.get("one"))["state"] in ENDS.get(verb, ["stopped"])
            answered = answer is not None and answer.status_code < 300
            assert not answered or await came_true(server, verb, answer)
            return
        again = await create(server)
        repeated = await create(server)
        assert again.json().get("sandbox") == repeated.json().get("sandbox")
        assert len(installation.node.sandboxes) == (1 if again.status_code == 201 else 0)
