"""The table of the data API: documented, and shut without a ticket."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_rig import DataClient, error_code

from cpuos.gateway.app import ROUTES
from cpuos.gateway.calls import Route

PAGE = Path(__file__).resolve().parents[3] / "api" / "gateway.md"
OPEN = {"/v1/health"}


def _name(row: Route) -> str:
    return f"{row.method} {row.path}"


@pytest.mark.parametrize("row", ROUTES, ids=_name)
def test_every_route_is_documented_and_has_a_scope(row: Route) -> None:
    assert f"`{_name(row)}`" in PAGE.read_text()
    assert row.scope in ("exec", "files", "link", "records") or row.path in OPEN
    assert (row.action is not None) == (row.scope is not None and _acts(row))


def _acts(row: Route) -> bool:
    """What changes something, or gives a file's content away, is journaled."""
    quiet = ("/stdin", "/resize", "/stat", "/list", "/watch", "/output", "/stream", "/wait")
    if row.path.endswith(quiet) or row.method == "HEAD":
        return False
    return row.method != "GET" or "files" in row.path or "links" in row.path


@pytest.mark.parametrize(
    "row", [row for row in ROUTES if row.method != "WEBSOCKET" and row.path not in OPEN], ids=_name
)
async def test_every_route_is_shut_without_a_ticket(client: DataClient, row: Route) -> None:
    path = row.path.format(sandbox="s" * 20, command="c" * 16, token="t")
    answer = await client.http.request(row.method, path, headers={"Authorization": ""})
    if row.method == "HEAD":
        assert answer.status_code == 401
    else:
        assert error_code(answer) in ("ticket_invalid", "key_missing")
    unknown = await client.http.request(row.method, path.replace("s" * 20, "u" * 20))
    assert unknown.status_code in (401, 404)


async def test_provoked_errors_have_three_lines(client: DataClient) -> None:
    answers = [
        await client.call("POST", "/commands", json={}),
        await client.call("POST", "/commands", json={"argv": []}),
        await client.call("POST", "/commands", content=b'{"argv": ['),
        await client.call("POST", "/commands", json={"command": "true", "env": {"a=b": ""}}),
        await client.call("POST", "/commands", json={"command": "true", "cwd": "/none"}),
        await client.call("POST", "/commands", json={"command": "true", "user": "nobody-here"}),
        await client.call("GET", "/commands/none"),
        await client.call("GET", "/commands?limit=x"),
        await client.call("GET", "/files?path=/none/x"),
        await client.call("GET", "/files/list?path=/none"),
        await client.call("GET", "/files?wrong=1"),
        await client.call("POST", "/files/move?path=/x"),
        await client.call("GET", "/commands", headers={"Authorization": "Bearer x"}),
        await client.http.get("/v1/nothing"),
    ]
    for answer in answers:
        assert answer.status_code >= 400
        error = answer.json()["error"]
        assert all(error[line].strip() for line in ("what", "why", "try")), error
        assert error["why"] not in error["what"], error
    assert answers[6].json()["error"]["try"] == f"cpuos ps {client.base.split('/')[3]}"
    assert answers[8].json()["error"]["try"].startswith(f"cpuos exec {client.base.split('/')[3]} ls -la /none")
