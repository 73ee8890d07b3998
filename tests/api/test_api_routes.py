"""All routes: who may call them, what is recorded of them, how they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import insert, update

from control_plane import Installation, Server, error_of
from cpuos.server.app import create_app, openapi
from cpuos.server.auth import Permission, create_key
from cpuos.server.db.models import ApiKey, Workspace
from cpuos.server.guard import Route
from cpuos.server.routes.table import ROUTES

# Without a key. Only ever shrinks.
OPEN_ROUTES = {"GET /v1/health"}
# They need a build to be there (see test_api_templates.py), or a guest that packs (see test_data_packs.py).
OF_BUILDS = {"create_build", "update_build", "delete_build", "delete_template", "create_pack", "delete_pack"}
READING = {"GET", "HEAD", "OPTIONS"}
BODIES = {
    "update_workspace_alarms": {"rules": ["cpu=90%/10m"]},
    "create_sandbox": {},
    "update_sandbox": {"labels": {}},
    "create_snapshot": {},
    "fork_sandbox": {},
    "fork_snapshot": {},
    "create_link": {"path": "a"},
    "create_port": {"port": 3000},
    "update_sandbox_network": {"mode": "off"},
    "update_workspace_network": {"mode": "internet"},
    "prune_storage": {},
    "create_pack": {"name": "data"},
}
NOT_FOUND = {"sandboxes": "sandbox_not_found", "snapshots": "snapshot_not_found"}
VERBS = {"create", "get", "list", "update", "delete", "pause", "resume", "fork", "prune", "recreate"}


def name(route: Route) -> str:
    return f"{route.method} {route.path}"


async def ref_of(server: Server, route: Route, sandbox: str) -> str:
    """What the route is about: the sandbox, or a snapshot of it."""
    if not route.path.startswith("/v1/snapshots/"):
        return sandbox
    return (await server.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})).json()["id"]


async def call(server: Server, route: Route, ref: str, key: str | None) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}".encode()} if key else {}
    body = BODIES.get(route.handler.__name__)
    path = route.path.replace("{ref}", ref).replace("{port}", "3000")
    request = server.http.build_request(route.method, path, json=body, headers=headers)
    if key is None:
        del request.headers["authorization"]
    return await server.http.send(request)


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_every_route_has_a_permission_and_a_changing_one_is_audited(route: Route) -> None:
    assert (route.permission is None) == (name(route) in OPEN_ROUTES)
    assert (route.audit is None) == (route.method in READING)
    if route.audit is not None:
        noun, _, verb = route.audit.partition(".")
        assert noun.isalpha()
        assert verb.isalpha()
    assert route.handler.__name__.split("_")[0] in VERBS


async def test_the_table_is_all_that_is_served(server: Server) -> None:
    app = create_app(server.plane)
    served = {(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}
    assert served == {(route.method, route.path) for route in ROUTES}


async def test_every_route_refuses_a_call_without_a_key(server: Server) -> None:
    for route in ROUTES:
        for key, code in ((None, "key_missing"), ("cpk_wrong", "key_invalid"), ("cpk_é", "key_invalid")):
            if route.permission is None:
                continue
            answer = await call(server, route, "abcd", key)
            assert answer.status_code == 401, name(route)
            assert error_of(answer)["code"] == code
            assert answer.headers["www-authenticate"] == "Bearer"
    assert server.installation.node.calls == {}


async def test_every_route_refuses_a_key_without_its_permission(server: Server) -> None:
    sandbox = (await server.created())["id"]
    for route in ROUTES:
        if route.permission is None:
            continue
        others = [permission for permission in Permission if permission is not route.permission]
        async with server.plane.database.write() as connection:
            clock = server.installation.clock
            key = await create_key(connection, workspace="default", name="other", clock=clock, permissions=others)
        answer = await call(server, route, sandbox, key)
        assert answer.status_code == 403, name(route)
        assert error_of(answer)["code"] == "forbidden"
        assert str(route.permission) in error_of(answer)["why"]
    assert (await server.get(sandbox))["state"] == "running"
    entries = (await server.http.get("/v1/audit")).json()["entries"]
    refused = [entry["action"] for entry in entries if entry["detail"].get("code") == "forbidden"]
    assert sorted(refused) == sorted(route.audit for route in ROUTES if route.audit)


async def test_every_changing_route_leaves_intent_and_outcome(server: Server) -> None:
    for route in ROUTES:
        if route.audit is None or route.handler.__name__ in OF_BUILDS:
            continue
        before = (await server.http.get("/v1/audit", params={"limit": 1000})).json()["entries"]
        sandbox = (await server.created())["id"]
        ref = await ref_of(server, route, sandbox)
        answer = await call(server, route, ref, server.installation.key)
        assert answer.status_code == route.status, answer.text
        failed = await call(server, route, "none-such", server.installation.key)
        after = (await server.http.get("/v1/audit", params={"limit": 1000})).json()["entries"]
        new = [entry for entry in after[len(before) :] if entry["action"] == route.audit]
        results = [(entry["phase"], entry["result"]) for entry in new][-4:]
        if "{ref}" not in route.path:
            assert results == [("intent", None), ("outcome", "ok")] * 2
            continue
        assert failed.status_code == 404
        assert results == [("intent", None), ("outcome", "ok"), ("intent", None), ("outcome", "error")], route.audit
        assert new[1]["intent_id"] == new[0]["id"]
        assert new[1]["sandbox"] == sandbox
        assert new[3]["detail"]["code"] == NOT_FOUND[route.path.split("/")[2]]


async def test_a_revoked_key_is_refused(installation: Installation) -> None:
    async with installation.serve() as server:
        async with server.plane.database.write() as connection:
            await connection.execute(update(ApiKey).values(revoked_at=installation.clock()))
        answer = await server.http.get("/v1/sandboxes")
        assert error_of(answer)["code"] == "key_invalid"


async def test_another_workspace_sees_nothing(server: Server) -> None:
    sandbox = (await server.created(name="mine"))["id"]
    clock = server.installation.clock
    async with server.plane.database.write() as connection:
        await connection.execute(insert(Workspace).values(id="other", name="other", created_at=clock()))
        key = await create_key(connection, workspace="other", name="k", clock=clock)
    for route in ROUTES:
        if "{ref}" not in route.path:
            continue
        mine = await ref_of(server, route, sandbox)
        for ref in (mine, "mine", mine[:5]):
            answer = await call(server, route, ref, key)
            assert answer.status_code == 404, name(route)
            assert error_of(answer)["code"] == NOT_FOUND[route.path.split("/")[2]]
    headers = {"authorization": f"Bearer {key}"}
    assert sandbox not in (await server.http.get("/v1/sandboxes?state=all", headers=headers)).text
    entries = (await server.http.get("/v1/audit", headers=headers)).json()["entries"]
    assert {entry["workspace"] for entry in entries} == {"other"}
    assert {entry["sandbox"] for entry in entries} == {None}


async def test_answers_carry_version_and_request_id(server: Server) -> None:
    for path in ("/v1/health", "/v1/sandboxes", "/v1/nothing", "/v1/sandboxes/nothing"):
        answer = await server.http.get(path)
        assert answer.headers["x-cpuos-version"] == "0.1.0"
        assert answer.headers["x-request-id"].startswith("req_")


async def test_health_tells_which_part_is_down(server: Server) -> None:
    server.installation.gateway.reachable = False
    answer = (await server.http.get("/v1/health", headers={"authorization": ""})).json()
    assert answer["status"] == "degraded"
    assert answer["parts"]["node"]["status"] == "ok"
    assert answer["parts"]["gateway"] == {"status": "unavailable", "reason": "it is down"}


async def test_templates_nodes_capacity(server: Server) -> None:
    await server.created(cpu=4, memory_mib=1024, disk_mib=2048)
    templates = (await server.http.get("/v1/templates")).json()["templates"]
    assert [template["name"] for template in templates] == ["base", "python"]
    (node,) = (await server.http.get("/v1/nodes")).json()["nodes"]
    assert (node["name"], node["reachable"]) == ("node-1", True)
    room = (await server.http.get("/v1/capacity")).json()
    assert room["sandboxes"] == {"total": 1000, "reserved": 1, "machine": 1000}
    assert room["cpu"] == {"total": 128, "reserved": 4, "machine": 16}
    assert room["memory_mib"] == {"total": 65536, "reserved": 1024, "machine": 65536}


def test_the_committed_description_is_that_of_the_code() -> None:
    committed = json.loads((Path(__file__).parents[2] / "api" / "openapi.json").read_text())
    assert committed == openapi(), "run: make gen"
