"""A fault at each step of each verb: the answer says so, and after a restart nothing of it is left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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

    def arm(self, at: int, *, after: bool) -> None:
        self.steps, self.at, self.after = [], at, after

    def disarm(self) -> None:
        self.at = None

    def before(self, name: str) -> bool:
        """Whether this step has to break when it is done."""
        self.steps.append(name)
        broken = len(self.steps) - 1 == self.at
        if broken and not self.after:
            raise fault(name)
        return broken


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
        late = injected.before("write")
        async with write(self) as connection:
            yield connection
        if late:
            raise fault("write")

    def breakable(kind: type, name: str) -> None:
        method: Callable[..., Any] = getattr(kind, name)

        async def call(self: Any, *arguments: Any, **options: Any) -> Any:
            late = injected.before(name)
            result = await method(self, *arguments, **options)
            if late:
                raise fault(name)
            return result

        monkeypatch.setattr(kind, name, call)

    monkeypatch.setattr(Database, "write", broken_write)
    for name in ("create", "delete"):
        breakable(FakeNode, name)
    for name in ("attach", "detach", "forget"):
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


VERBS = {"create": create, "kill": kill, "die": die, "expire": expire}
STEPS = {
    "create": ["write", "write", "create", "attach", "write", "write"],
    "kill": ["write", "write", "detach", "delete", "write", "write"],
    "die": ["write", "write", "detach", "write", "delete"],
    "expire": ["write", "write", "detach", "delete", "write"],
}


@pytest.mark.parametrize("verb", VERBS)
async def test_the_steps_are_these(installation: Installation, faults: Faults, verb: str) -> None:
    async with installation.serve() as server:
        if verb != "create":
            await server.created(name="one")
        faults.arm(-1, after=False)
        await VERBS[verb](server)
        assert faults.steps == STEPS[verb]


@pytest.mark.parametrize("after", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize(("verb", "at"), [(verb, at) for verb in VERBS for at in range(len(STEPS[verb]))])
async def test_fault(installation: Installation, faults: Faults, verb: str, at: int, after: bool) -> None:
    async with installation.serve(stop_grace_s=0) as server:
        if verb != "create":
            await server.created(name="one")
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
            assert (await server.get("one"))["state"] in {"kill": ["stopped", "running"], "die": ["lost"]}.get(
                verb, ["stopped"]
            )
            return
        again = await create(server)
        repeated = await create(server)
        assert again.json().get("sandbox") == repeated.json().get("sandbox")
        assert len(installation.node.sandboxes) == (1 if again.status_code == 201 else 0)
