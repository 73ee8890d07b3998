"""The description and the API agree: generated calls get only answers that it describes, and never a fault of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import Case

from control_plane import Installation, Server
from cpuos.server.app import openapi


def generated_cases(operation: Any, count: int) -> list[Case]:
    cases: list[Case] = []

    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(operation.as_strategy())
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


READ_BY_VALIDATORS = {"NetworkPolicy.allow[]", "NetworkPolicy.deny[]", "TemplateBuild.env[]"}
"""Texts without a pattern or a longest length: what reads them demands a form."""
OF_THE_URL = {"label of list_sandboxes[]"}


def unbounded(schema: dict[str, Any], node: dict[str, Any], at: str, seen: frozenset[str]) -> Iterator[str]:
    """Texts in a request that may be anything of any length."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from unbounded(schema, schema["components"]["schemas"][name], name, seen | {name})
        return
    bounded = {"pattern", "maxLength", "enum", "const", "format"} & node.keys()
    if node.get("type") == "string" and not bounded:
        yield at
    inner = [(one, at) for key in ("anyOf", "allOf", "oneOf") for one in node.get(key, [])]
    inner += [(one, f"{at}.{name}") for name, one in node.get("properties", {}).items()]
    inner += [(node[key], f"{at}[]") for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)]
    inner += [(one, f"{at}[]") for one in node.get("patternProperties", {}).values()]
    for one, where in inner:
        yield from unbounded(schema, one, where, seen)


def test_every_text_of_a_request_has_a_form_or_a_longest_length() -> None:
    """Without either it may also be half of a surrogate pair, which is kept and then can be told to nobody."""
    schema, found = openapi(), set()
    for operation in (one for path in schema["paths"].values() for one in path.values()):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        found |= set(unbounded(schema, body, "", frozenset()))
        for one in operation.get("parameters", []):
            named = f"{one['name']} of {operation['operationId']}"
            found |= set(unbounded(schema, one["schema"], named, frozenset()))
    assert found == READ_BY_VALIDATORS | OF_THE_URL


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sandboxes", b'{"network": {"mode": "allowlist", "allow": ["%b"]}}'),
        ("/v1/sandboxes", b'{"network": {"deny": ["%b"]}}'),
        ("/v1/builds", b'{"name": "t", "env": {"A": "%b"}}'),
    ],
)
@pytest.mark.parametrize("text", [b"\\ud800", b"\\udfff", b"\\u0000", b"a" * 5000])
async def test_what_validators_read_has_a_form(server: Server, path: str, body: bytes, text: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = await server.http.post(path, content=body.replace(b"%b", text), headers=headers)
    assert answer.status_code == 422, answer.text


async def test_generated_calls(tmp_path: Path) -> None:
    schema = schemathesis.openapi.from_dict(json.loads(json.dumps(openapi())))
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 12
    prepared = await asyncio.to_thread(lambda: [(one, generated_cases(one, 25)) for one in operations])
    async with Installation(folder=tmp_path).serve(agent_wait_s=1) as server:
        await server.created(name="one")
        seen: set[int] = set()
        for operation, cases in prepared:
            for case in cases:
                sent = case.as_transport_kwargs(base_url="http://api")
                sent.pop("cookies", None)
                sent["headers"] = {**(sent.get("headers") or {}), "Authorization": f"Bearer {server.installation.key}"}
                answer = await server.http.request(**sent)
                seen.add(answer.status_code)
                assert answer.status_code < 500, (case.as_curl_command(), answer.text)
                described = operation.definition.raw["responses"]
                assert str(answer.status_code) in described or "default" in described
                if answer.status_code >= 400:
                    assert set(answer.json()["error"]) == {"code", "what", "why", "try", "details"}
        assert {200, 201, 422} <= seen
