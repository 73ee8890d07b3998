"""The network policy and the record of connections, against a scripted server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpuos import AsyncClient, AsyncSandbox, Network
from cpuos.errors import InvalidRequest
from unit.client.fake_api import SANDBOX_ID, FakeApi

NETWORK = f"/v1/sandboxes/{SANDBOX_ID}/network"
CONNECTIONS = f"/v1/sandboxes/{SANDBOX_ID}/connections"
POLICIES: list[tuple[Any, dict[str, Any]]] = [
    ("internet", {"mode": "internet"}),
    ("off", {"mode": "off"}),
    (Network(), {"mode": "internet", "allow": [], "deny": []}),
    (Network(allow=["*.A.example"]), {"mode": "allowlist", "allow": ["*.a.example"], "deny": []}),
    (Network(allow=[]), {"mode": "allowlist", "allow": [], "deny": []}),
    (Network(deny=("1.2.3.0/24:443",)), {"mode": "internet", "allow": [], "deny": ["1.2.3.0/24:443"]}),
]
WRONG: list[Any] = [
    "on",
    7,
    {"allow": ["a.example"]},
    Network(allow="a.example"),
    Network(allow=["http://a.example/"]),
    Network(deny=["fe80::1"]),
]


@pytest.mark.parametrize(("network", "sent"), POLICIES)
async def test_a_policy_goes_with_the_create(api: FakeApi, network: Any, sent: dict[str, Any]) -> None:
    sbx = await AsyncSandbox.create(network=network)
    assert json.loads(api.calls("POST", "/v1/sandboxes")[0].body) == {"template": "python", "network": sent}
    await sbx.close()


@pytest.mark.parametrize(("network", "sent"), POLICIES)
async def test_a_policy_is_replaced(api: FakeApi, network: Any, sent: dict[str, Any]) -> None:
    sbx = await AsyncSandbox.create()
    shown = await sbx.network.update(network)
    assert json.loads(api.calls("PUT", NETWORK)[0].body) == sent
    assert (shown.policy.mode, shown.applied) == (sent["mode"], True)
    assert await sbx.network.get() == shown
    await sbx.close()


@pytest.mark.parametrize("network", WRONG)
async def test_a_wrong_policy_is_told_before_anything_is_sent(api: FakeApi, network: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await AsyncSandbox.create(network=network)
    assert str(caught.value.details["field"]).startswith("network")
    assert api.calls("POST", "/v1/sandboxes") == []


@pytest.mark.parametrize(("network", "sent"), POLICIES)
async def test_the_policy_of_the_workspace_is_replaced(api: FakeApi, network: Any, sent: dict[str, Any]) -> None:
    async with AsyncClient() as client:
        shown = await client.network.update(network)
        assert json.loads(api.calls("PUT", "/v1/workspace/network")[0].body) == sent
        assert shown.policy.mode == sent["mode"]
        assert await client.network.get() == shown


async def test_a_wrong_policy_of_the_workspace_is_told_before_anything_is_sent(api: FakeApi) -> None:
    async with AsyncClient() as client:
        for network in WRONG:
            with pytest.raises(InvalidRequest) as caught:
                await client.network.update(network)
            assert caught.value.what.startswith("cannot")
    assert api.seen == []


async def test_connections_are_read_to_the_last_page(api: FakeApi) -> None:
    sbx = await AsyncSandbox.create()
    api.connections = [
        {
            "id": number,
            "at": "2026-01-01T00:00:00Z",
            "sandbox": SANDBOX_ID,
            "kind": "tcp",
            "address": "93.184.215.14",
            "port": 443,
            "verdict": "refused" if number % 2 else "allowed",
            "rule": "internet",
        }
        for number in range(1, 2502)
    ]
    assert [one.id for one in await sbx.audit.connections()] == list(range(1, 2502))
    assert len(api.calls("GET", CONNECTIONS)) == 3
    assert {one.verdict for one in await sbx.audit.connections(verdict="refused")} == {"refused"}
    await sbx.close()
