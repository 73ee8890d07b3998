"""An allow list that names what is always blocked is refused by every call that takes one; what was excepted is not."""

from __future__ import annotations

import pytest

from control_plane import Installation, Server, error_of
from cpuos.types.exceptions import parse_exceptions


@pytest.mark.parametrize("entry", ["10.0.0.0/8", "localhost", "169.254.169.254", "metadata.google.internal"])
async def test_it_is_refused_by_name(server: Server, entry: str) -> None:
    sandbox = (await server.created())["id"]
    before = len(server.installation.node.sandboxes)
    answers = [
        await server.create(network={"allow": ["a.example", entry]}),
        await server.http.put(f"/v1/sandboxes/{sandbox}/network", json={"allow": [entry]}),
        await server.http.put("/v1/workspace/network", json={"allow": [entry]}),
    ]
    for answer, field in zip(answers, ("network.allow", "allow", "allow"), strict=True):
        assert answer.status_code == 422 or answer.status_code == 400, answer.text
        error = error_of(answer)
        assert entry in error["what"]
        assert "network_exceptions" in error["why"]
        assert (error["details"]["field"], error["details"]["entry"]) == (field, entry)
    assert len(server.installation.node.sandboxes) == before
    assert (await server.http.get(f"/v1/sandboxes/{sandbox}/network")).json()["version"] == 1
    assert (await server.http.get("/v1/workspace/network")).json()["policy"]["mode"] == "internet"


async def test_what_the_operator_has_excepted_is_taken(installation: Installation) -> None:
    exceptions = parse_exceptions(["mirror.corp=10.20.0.5:443"])
    async with installation.serve(network_exceptions=exceptions) as server:
        sandbox = await server.created(network={"allow": ["mirror.corp", "10.20.0.0/16"]})
        assert sandbox["network"]["allow"] == ["mirror.corp", "10.20.0.0/16"]
        answer = await server.create(network={"allow": ["mirror.corp:80"]})
        assert "mirror.corp:80" in error_of(answer)["what"]


async def test_a_policy_on_record_stays_when_its_exception_goes(installation: Installation) -> None:
    """It opens nothing more; what is on record is read and told as it was written."""
    async with installation.serve(network_exceptions=parse_exceptions(["mirror.corp=10.20.0.5:443"])) as server:
        sandbox = (await server.created(network={"allow": ["mirror.corp"]}))["id"]
        await server.http.put("/v1/workspace/network", json={"allow": ["mirror.corp", "a.example"]})
    async with installation.serve() as server:
        told = (await server.http.get(f"/v1/sandboxes/{sandbox}/network")).json()
        assert told["policy"]["allow"] == ["mirror.corp"]
        assert told["workspace_policy"]["allow"] == ["mirror.corp", "a.example"]
        await server.created()
