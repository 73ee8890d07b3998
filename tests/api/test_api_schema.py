"""The description and the API agree: generated calls get only answers that it describes, and never a fault of ours."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck
from schemathesis import Case

from control_plane import Installation
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
