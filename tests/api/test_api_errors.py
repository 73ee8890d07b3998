"""Wrong calls: each a clear error in one shape, nothing half-done."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from control_plane import Installation, Server, error_of
from cpuos.errors import ERRORS, AgentFailure, SetupRequired
from cpuos.server.auth import Permission as P
from cpuos.server.auth import create_key
from cpuos.server.envelope import MAX_BODY_BYTES


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"cpu": 0}, "cpu", "0"),
        ({"cpu": "many"}, "cpu", "'many'"),
        ({"memory_mib": 1}, "memory_mib", "1"),
        ({"timeout_s": -1}, "timeout_s", "-1"),
        ({"timeout_s": "15m"}, "timeout_s", "'15m'"),
        ({"name": "Not A Name"}, "name", "'Not A Name'"),
        ({"template": "../etc"}, "template", "'../etc'"),
        ({"labels": {"a b": "c"}}, "labels.a b.[key]", "'a b'"),
        ({"min_isolation": "strong"}, "min_isolation", "'strong'"),
        ({"tiemout_s": 5}, "tiemout_s", "5"),
        ({"runtime": "r" * 64}, "runtime", f"'{'r' * 64}'"),
    ],
)
async def test_a_wrong_value_is_named(server: Server, body: dict[str, Any], field: str, value: str) -> None:
    answer = await server.create(**body)
    assert answer.status_code == 422
    error = error_of(answer)
    assert error["code"] == "invalid_request"
    assert error["what"] == f"cannot read the request: {field} = {value}"
    assert error["why"]
    assert error["details"]["field"] == field
    assert server.installation.node.calls == {}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b"[" * 100_000, b'{"cpu": 1e999}', b'{"runtime": "\\ud800"}'],
)
async def test_a_body_that_is_no_request(server: Server, body: bytes) -> None:
    answer = await server.http.post("/v1/sandboxes", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_request")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/sandboxes", b'{"%b": 1}'),
        ("POST", "/v1/sandboxes", b'{"runtime": "%b"}'),
        ("POST", "/v1/sandboxes", b'{"labels": {"%b": "a"}}'),
        ("POST", "/v1/sandboxes", b'{"network": {"allow": ["%b"]}}'),
        ("POST", "/v1/sandboxes", b'{"alarms": ["%b"]}'),
        ("POST", "/v1/builds", b'{"name": "a", "image": {"reference": "%b"}}'),
        ("DELETE", "/v1/sandboxes/%b", b""),
        ("PATCH", "/v1/sandboxes/%b", b"{}"),
        ("DELETE", "/v1/packs/%b", b""),
    ],
)
@pytest.mark.parametrize("permitted", [True, False])
async def test_a_wrong_call_writes_little_into_the_audit(
    installation: Installation, server: Server, method: str, path: str, body: bytes, permitted: bool
) -> None:
    """What cannot be right is not kept at whatever length and form it came."""
    headers = {"content-type": "application/json"}
    if not permitted:
        async with server.plane.database.write() as connection:
            key = await create_key(
                connection, workspace="default", name="r", clock=installation.clock, permissions=[P.AUDIT_READ]
            )
        headers["authorization"] = f"Bearer {key}"
    long = b"a" * 60_000
    answer = await server.http.request(
        method, path.replace("%b", "%00%1b" + long.decode()), content=body.replace(b"%b", long), headers=headers
    )
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 4000
    told = (await server.http.get("/v1/audit")).json()["entries"]
    assert told
    assert all(len(json.dumps(entry)) < 1500 and entry["target"].isprintable() for entry in told)


async def test_a_body_over_the_limit(server: Server) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 65536

    for content in (b" " * (MAX_BODY_BYTES + 1), endless()):
        answer = await server.http.post("/v1/sandboxes", content=content)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
        assert str(MAX_BODY_BYTES) in error_of(answer)["why"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"name": "Not A Name"}, "a name has lower-case letters, digits and inner hyphens, up to 63"),
        ({"memory_mib": 1}, "memory is 128 MiB to 1 TiB, as a whole number of MiB"),
        ({"timeout_s": "15m"}, "a timeout is over 0 s and up to 30 days, as a number of seconds"),
        ({"tiemout_s": 5}, "there is no such field; timeout_s is near"),
    ],
)
async def test_a_wrong_value_is_explained_in_a_sentence(server: Server, body: dict[str, Any], why: str) -> None:
    error = error_of(await server.create(**body))
    assert error["why"] == why
    assert error["try"].startswith("for example ")


async def test_provoked_errors_have_three_lines(server: Server) -> None:
    http = server.http
    answers = [
        await http.post("/v1/sandboxes", content=b'{"cpu": 2', headers={"content-type": "application/json"}),
        await http.post("/v1/sandboxes", content=b"{}"),
        await http.post("/v1/sandboxes", json=[]),
        await http.get("/v1/sandboxes?state=flying"),
        await http.get("/v1/sandboxes?label=x"),
        await http.get("/v1/sandboxes/none"),
        await http.get("/v1/nothing"),
        await http.get("/v1/capacity", headers={"authorization": "Bearer x"}),
        await http.get("/v1/audit?action=nope"),
        await http.get("/v1/audit?limit=0"),
        await server.create(template="ruby"),
        await server.create(runtime="none"),
        await server.create(memory_mib=1 << 20),
        await server.create(min_isolation="microvm"),
    ]
    for answer in answers:
        assert answer.status_code >= 400
        error = error_of(answer)
        assert all(error[line].strip() for line in ("what", "why", "try")), error
        assert error["why"] not in error["what"], error
    position, media = error_of(answers[0]), error_of(answers[1])
    assert "position 9" in position["why"]
    assert media["try"] == "send Content-Type: application/json"
    assert error_of(answers[12])["try"].startswith("ask for at most 65536 MiB memory")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/v1/nothing"), ("PUT", "/v1/sandboxes"), ("GET", "/v1/sandboxes/")]
)
async def test_an_unknown_route(server: Server, method: str, path: str) -> None:
    answer = await server.http.request(method, path)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")


@pytest.mark.parametrize("query", ["state=flying", "limit=0", "limit=x", "label=nocolon", "name=" + "x" * 64])
async def test_a_wrong_query(server: Server, query: str) -> None:
    answer = await server.http.get(f"/v1/sandboxes?{query}")
    assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_request")


async def test_unknown_template_lists_the_known(server: Server) -> None:
    answer = await server.create(template="ruby")
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (404, "template_not_found")
    assert error["why"] == "installed are: base, python"
    assert error["details"]["templates"] == ["base", "python"]


async def test_isolation_that_is_not_there(server: Server) -> None:
    error = error_of(await server.create(min_isolation="microvm"))
    assert error["code"] == "runtime_unavailable"
    assert error["try"] == "cpuos doctor"


async def test_a_name_is_unique_among_the_living(server: Server) -> None:
    first = await server.created(name="one")
    error = error_of(await server.create(name="one"))
    assert error["code"] == "name_taken"
    assert "'one'" in error["what"]
    await server.kill("one")
    second = await server.created(name="one")
    assert (await server.get("one"))["id"] == second["id"]
    assert (await server.get(first["id"]))["state"] == "stopped"


async def test_a_prefix_that_means_two(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["abcd" + "0" * 16, "abcd" + "1" * 16])
    monkeypatch.setattr("cpuos.server.lifecycle.new_id", lambda: next(ids))
    await server.created()
    await server.created()
    answer = await server.http.get("/v1/sandboxes/abcd")
    assert (answer.status_code, error_of(answer)["code"]) == (409, "name_ambiguous")
    assert (await server.get("abcd0"))["id"] == "abcd" + "0" * 16
    assert error_of(await server.http.get("/v1/sandboxes/abc"))["code"] == "sandbox_not_found"
    await server.kill("abcd0")
    assert (await server.get("abcd"))["id"] == "abcd" + "1" * 16


@pytest.mark.parametrize("ref", ["%00", "a%2Fb", "x" * 64, "%", "é", "' OR 1=1 --", "____"])
async def test_strange_refs(server: Server, ref: str) -> None:
    await server.created()
    answer = await server.http.get(f"/v1/sandboxes/{ref}")
    assert answer.status_code in (404, 422), answer.text
    assert error_of(answer)["code"] in ("sandbox_not_found", "not_found", "invalid_request")


@pytest.mark.parametrize("part", ["node", "gateway"])
async def test_a_part_that_is_down(installation: Installation, part: str) -> None:
    async with installation.serve() as server:
        await server.created()
        getattr(installation, part).reachable = False
        await server.settle()
        answer = await server.create()
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (503, f"{part}_unavailable")
        getattr(installation, part).reachable = True
        await server.settle()
        assert len(installation.node.sandboxes) == 1
        await server.created()


@pytest.mark.parametrize(
    "failure",
    [
        SetupRequired("cannot start sandbox: runsc is of 2022", "the pin is of 2026", code="runtime_version"),
        SetupRequired("cannot start sandbox: mount failed", "needs root", code="needs_root"),
    ],
)
async def test_a_failure_of_the_node_is_told_and_undone(server: Server, failure: SetupRequired) -> None:
    server.installation.node.create_error = failure
    answer = await server.create(name="broken")
    assert (answer.status_code, error_of(answer)["what"]) == (failure.status, failure.what)
    record = await server.get("broken")
    assert record["state"] == "failed"
    assert failure.what in record["reason"]
    assert (await server.http.get("/v1/capacity")).json()["sandboxes"]["reserved"] == 0
    error = error_of(await server.http.post("/v1/sandboxes/broken/access"))
    assert error["code"] == "wrong_state"
    assert failure.what in error["why"]


async def test_an_agent_that_does_not_answer_fails_the_create(server: Server) -> None:
    server.installation.gateway.attach_error = AgentFailure("cannot reach the agent", code="agent_unresponsive")
    answer = await server.create()
    assert (answer.status_code, error_of(answer)["code"]) == (504, "agent_unresponsive")
    assert server.installation.node.sandboxes == {}
    assert len(server.installation.gateway.forgotten) == 1


async def test_a_fault_of_ours_tells_no_internals(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("secret-password at /var/lib/cpuos")

    monkeypatch.setattr(server.installation.node, "create", broken)
    answer = await server.create()
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (500, "internal")
    assert error["details"]["request"] == answer.headers["x-request-id"]
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    records = (await server.http.get("/v1/sandboxes?state=failed")).json()["sandboxes"]
    assert "secret" not in records[0]["reason"]

    def unreadable() -> None:
        raise RuntimeError("secret-password")

    monkeypatch.setattr(server.plane.database, "read", unreadable)
    answer = await server.http.get("/v1/sandboxes")
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
    assert "secret" not in answer.text


@pytest.mark.parametrize(("end", "code", "status"), [("kill", "sandbox_stopped", 410), ("die", "sandbox_lost", 410)])
async def test_no_way_into_an_ended_sandbox(server: Server, end: str, code: str, status: int) -> None:
    sandbox = (await server.created())["id"]
    if end == "kill":
        await server.kill(sandbox)
    else:
        await server.installation.node.die(sandbox)
        await server.settle()
    answer = await server.http.post(f"/v1/sandboxes/{sandbox}/links", json={"path": "a"})
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)
    answer = await server.http.patch(f"/v1/sandboxes/{sandbox}", json={"timeout_s": 60})
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


async def test_too_many_calls_at_once(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.server.quotas.Quotas.__init__.__kwdefaults__", {"max_calls": 3})
    async with installation.serve() as server:
        installation.node.create_gate.clear()
        waiting = [asyncio.create_task(server.create()) for _ in range(5)]
        refusals = itertools.islice(asyncio.as_completed(waiting), 2)
        assert [error_of(await answer)["code"] for answer in refusals] == ["limit_reached"] * 2
        installation.node.create_gate.set()
        answers = await asyncio.gather(*waiting)
        refused = [answer for answer in answers if answer.status_code != 201]
        assert [error_of(answer)["code"] for answer in refused] == ["limit_reached"] * 2


async def test_every_code_of_the_server_has_its_status() -> None:
    for code, (kind, status, _) in ERRORS.items():
        assert kind("cannot", code=code).status == status
