"""A gateway that refuses to publish a port: the list does not say that it is published."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane import Server, error_of
from cpuos.errors import Conflict, CpuosError, LimitReached, NotFound, Unavailable

REFUSALS = [
    LimitReached("cannot publish port 3000", "512 ports of the sandbox were published"),
    Conflict("cannot publish port 3000: it was closed meanwhile", code="wrong_state"),
    NotFound("cannot find sandbox", code="sandbox_not_found"),
]


@pytest.fixture
def refusing(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    def refuse(error: CpuosError) -> None:
        async def open_port(*args: Any, **told: Any) -> None:
            raise error

        monkeypatch.setattr(server.installation.gateway, "open_port", open_port)

    yield refuse
    monkeypatch.undo()


async def publish(server: Server, sandbox: str, **body: Any) -> Any:
    return await server.http.post(f"/v1/sandboxes/{sandbox}/ports", json={"port": 3000, **body})


async def listed(server: Server, sandbox: str) -> list[tuple[int, bool]]:
    answer = await server.http.get(f"/v1/sandboxes/{sandbox}/ports")
    return [(one["port"], one["public"]) for one in answer.json()["ports"]]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.code)
async def test_it_is_not_on_the_list(server: Server, refusing: Any, monkeypatch: Any, refusal: CpuosError) -> None:
    sandbox = (await server.created())["id"]
    refusing(refusal)
    for public in (False, True):
        assert error_of(await publish(server, sandbox, public=public))["code"] == refusal.code
        assert await listed(server, sandbox) == []
    monkeypatch.undo()
    assert (await publish(server, sandbox)).status_code == 200
    assert await listed(server, sandbox) == [(3000, False)]
    told = server.installation.gateway.ports[sandbox, 3000]
    assert told["epoch"] == 3, "numbers of what was refused do not come back"


async def test_what_was_published_before_stays_as_it_was(server: Server, refusing: Any, monkeypatch: Any) -> None:
    sandbox = (await server.created())["id"]
    assert (await publish(server, sandbox)).status_code == 200
    refusing(REFUSALS[0])
    assert (await publish(server, sandbox, public=True, host="localhost")).status_code == 429
    assert await listed(server, sandbox) == [(3000, False)]
    monkeypatch.undo()
    assert (await publish(server, sandbox)).status_code == 200
    told = server.installation.gateway.ports[sandbox, 3000]
    assert (told["epoch"], told["public"], told["host"]) == (1, False, None)


async def test_what_a_silent_gateway_may_have_opened_stays_on_the_list(server: Server, refusing: Any) -> None:
    sandbox = (await server.created())["id"]
    refusing(Unavailable("cannot reach the gateway", "it is down", code="gateway_unavailable"))
    assert (await publish(server, sandbox, public=True)).status_code == 503
    assert await listed(server, sandbox) == [(3000, True)]
