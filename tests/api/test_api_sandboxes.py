"""Create, get, list, update, kill over HTTP."""

from __future__ import annotations

import re

from control_plane import Server, error_of
from cpuos.types.sandbox import SANDBOX_ID_PATTERN


async def test_create_get_list_kill(server: Server) -> None:
    answer = await server.create(name="one", labels={"team": "data"})
    assert answer.status_code == 201, answer.text
    sandbox, access = answer.json()["sandbox"], answer.json()["access"]
    assert sandbox["state"] == "running"
    assert re.match(SANDBOX_ID_PATTERN, sandbox["id"])
    assert access["data_url"] == "http://127.0.0.1:7071"
    assert access["ticket"].count(".") == 2
    assert server.installation.gateway.attached == {sandbox["id"]: 1}
    assert await server.get("one") == sandbox
    assert await server.get(sandbox["id"][:6]) == sandbox
    listed = (await server.http.get("/v1/sandboxes", params={"label": "team:data"})).json()["sandboxes"]
    assert listed == [sandbox]
    killed = await server.kill("one")
    assert killed.status_code == 200, killed.text
    assert killed.json()["state"] == "stopped"
    assert killed.json()["reason"] == "killed by the key 'first'"
    assert server.installation.node.sandboxes == {}
    assert (await server.kill(sandbox["id"])).json() == killed.json()


async def test_unknown_sandbox(server: Server) -> None:
    answer = await server.http.get("/v1/sandboxes/nothing")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "sandbox_not_found"
    assert "'nothing'" in error_of(answer)["what"]
