"""Published ports over the API: what is answered, what the gateway is told, what a token says."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import httpx2
import jwt
import pytest

from control_plane import Server, error_of


async def publish(server: Server, ref: str, **body: Any) -> httpx2.Response:
    return await server.http.post(f"/v1/sandboxes/{ref}/ports", json={"port": 3000, **body})


async def published(server: Server, ref: str, **body: Any) -> dict[str, Any]:
    answer = await publish(server, ref, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def claims(token: str) -> dict[str, Any]:
    return jwt.decode(token, options={"verify_signature": False})


async def test_a_private_port(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    access = await published(server, "one")
    assert access["url"] == f"http://3000-{sandbox}.preview.localhost:7072/"
    assert access["public"] is False
    left = datetime.fromisoformat(access["expires_at"]) - server.installation.clock()
    assert timedelta(minutes=59, seconds=59) < left < timedelta(hours=1)
    told = claims(access["token"])
    assert {name: told[name] for name in ("sbx", "gen", "port", "epoch", "scope", "iss")} == {
        "sbx": sandbox,
        "gen": 1,
        "port": 3000,
        "epoch": 1,
        "scope": ["preview"],
        "iss": "cpuos",
    }
    assert "host" not in told
    assert server.installation.gateway.ports[sandbox, 3000] == {
        "epoch": 1,
        "generation": 1,
        "public": False,
        "public_until": None,
        "host": None,
    }


async def test_a_public_port_has_no_token(server: Server) -> None:
    sandbox = (await server.created())["id"]
    access = await published(server, sandbox, public=True, host="localhost", expires_s=60)
    assert (access["public"], access["token"]) == (True, None)
    told = server.installation.gateway.ports[sandbox, 3000]
    assert (told["public"], told["host"]) == (True, "localhost")
    left = told["public_until"] - server.installation.clock()
    assert timedelta(seconds=59) < left < timedelta(seconds=60)
    forever = await published(server, sandbox, public=True)
    assert forever["expires_at"] is None
    assert server.installation.gateway.ports[sandbox, 3000]["public_until"] is None


async def test_asking_privately_leaves_a_public_port_public(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await published(server, sandbox, public=True)
    access = await published(server, sandbox, host="localhost", expires_s=5)
    assert access["public"] is True
    assert claims(access["token"])["host"] == "localhost"
    told = server.installation.gateway.ports[sandbox, 3000]
    assert (told["public"], told["host"], told["public_until"]) == (True, None, None)


async def test_closing_begins_another_epoch(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await published(server, sandbox, public=True)
    left = await server.http.delete(f"/v1/sandboxes/{sandbox}/ports/3000")
    assert (left.status_code, left.json()) == (200, {"ports": []})
    assert server.installation.gateway.ports == {}
    access = await published(server, sandbox)
    assert (access["public"], claims(access["token"])["epoch"]) == (False, 2)
    again = await server.http.delete(f"/v1/sandboxes/{sandbox}/ports/3999")
    assert [port["port"] for port in again.json()["ports"]] == [3000]


async def test_what_is_published_is_listed(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await published(server, sandbox, port=4000, public=True, expires_s=60)
    await published(server, sandbox)
    ports = (await server.http.get(f"/v1/sandboxes/{sandbox}/ports")).json()["ports"]
    assert [(port["port"], port["public"]) for port in ports] == [(3000, False), (4000, True)]
    assert all("token" not in port for port in ports)
    assert ports[0]["created_by"].startswith("key:")
    server.installation.clock.advance(61)
    ports = (await server.http.get(f"/v1/sandboxes/{sandbox}/ports")).json()["ports"]
    assert [port["public"] for port in ports] == [False, False]
    await server.kill(sandbox)
    assert (await server.http.get(f"/v1/sandboxes/{sandbox}/ports")).json() == {"ports": []}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"port": 0}, "port"),
        ({"port": 1}, "port"),
        ({"port": 65536}, "port"),
        ({"port": "3000x"}, "port"),
        ({"expires_s": 0}, "expires_s"),
        ({"expires_s": 8 * 86400}, "expires_s"),
        ({"host": "example.com"}, "host"),
        ({"surprise": 1}, "surprise"),
    ],
)
async def test_wrong_values_are_named(server: Server, body: dict[str, Any], field: str) -> None:
    sandbox = (await server.created())["id"]
    answer = await publish(server, sandbox, **body)
    assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_request")
    assert error_of(answer)["details"]["field"] == field
    assert server.installation.gateway.ports == {}


async def test_an_ended_sandbox_publishes_nothing(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await server.kill(sandbox)
    answer = await publish(server, sandbox)
    assert (answer.status_code, error_of(answer)["code"]) == (410, "sandbox_stopped")


async def test_a_gateway_out_of_reach_leaves_a_port_as_it_is(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await published(server, sandbox, public=True)
    server.installation.gateway.reachable = False
    answer = await server.http.delete(f"/v1/sandboxes/{sandbox}/ports/3000")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "gateway_unavailable")
    assert (await publish(server, sandbox)).status_code == 503
    listed = (await server.http.get(f"/v1/sandboxes/{sandbox}/ports")).json()["ports"]
    assert [port["public"] for port in listed] == [True]  # nobody is told that it is closed while it is open
    server.installation.gateway.reachable = True
    assert (await server.http.delete(f"/v1/sandboxes/{sandbox}/ports/3000")).json() == {"ports": []}


async def test_the_audit_says_what_was_opened(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await published(server, sandbox, public=True)
    await server.http.delete(f"/v1/sandboxes/{sandbox}/ports/3000")
    entries = (await server.http.get("/v1/audit", params={"action": "port"})).json()["entries"]
    outcomes = [(entry["action"], entry["detail"]) for entry in entries if entry["phase"] == "outcome"]
    assert outcomes == [("port.open", {"port": 3000, "public": True}), ("port.close", {"port": 3000})]
