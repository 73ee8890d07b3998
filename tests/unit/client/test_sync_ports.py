# Generated from tests/unit/client/test_async_ports.py by scripts/gen_sync.py; edit that.
"""`sbx.ports` against a scripted server and a scripted preview."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpuos.client import Sandbox
from cpuos.errors import AuthenticationError, InvalidRequest, PortProblem
from unit.client.fake_api import SANDBOX_ID, FakeApi

PORTS = f"/v1/sandboxes/{SANDBOX_ID}/ports"
BROWSER = "/devtools/browser/6c7a4e0c-3b1f-4f8e-9a55-d2b0e1f0a1b2"


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, {"port": 3000, "public": False}),
        ({"public": True}, {"port": 3000, "public": True}),
        (
            {"expires": "2h", "host": "localhost"},
            {"port": 3000, "public": False, "expires_s": 7200.0, "host": "localhost"},
        ),
        ({"expires": 90}, {"port": 3000, "public": False, "expires_s": 90.0}),
    ],
)
def test_a_url_is_asked_for(api: FakeApi, options: dict[str, Any], sent: dict[str, Any]) -> None:
    with Sandbox.create() as sbx:
        url = sbx.ports.url(3000, **options)
        call = [seen for seen in api.seen if seen.path == PORTS][-1]
        assert (call.method, json.loads(call.body)) == ("POST", sent)
        base = f"http://3000-{SANDBOX_ID}.preview.localhost:"
        assert url.startswith(base)
        assert url.endswith("/" if options.get("public") else "/?cpuos_token=secret")


def test_the_parts_of_a_url(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        access = sbx.ports.publish(3000)
        assert (access.port, access.token, access.public) == (3000, "secret", False)
        assert "secret" not in access.url


def test_what_is_published_is_listed_and_closed(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        sbx.ports.url(3000, public=True)
        assert [(port.port, port.public) for port in sbx.ports.list()] == [(3000, True)]
        sbx.ports.close(3000)
        assert sbx.ports.list() == []
        assert [seen.method for seen in api.seen if seen.path == f"{PORTS}/3000"] == ["DELETE"]


@pytest.mark.parametrize(
    ("port", "options"),
    [(0, {}), (1, {}), (70000, {}), ("x", {}), (3000, {"host": "example.com"}), (3000, {"expires": "8d"})],
)
def test_wrong_values_are_named_before_anything_is_sent(api: FakeApi, port: Any, options: dict[str, Any]) -> None:
    with Sandbox.create() as sbx:
        before = len(api.seen)
        with pytest.raises(InvalidRequest, match="cannot publish the port"):
            sbx.ports.url(port, **options)
        assert len(api.seen) == before


def test_a_browser_is_found(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        api.preview = (200, {"webSocketDebuggerUrl": f"ws://localhost:9222{BROWSER}"}, {})
        url = sbx.ports.cdp_url(9222)
        asked = [seen for seen in api.seen if seen.path == "/json/version"][-1]
        assert asked.headers["x-cpuos-preview-token"] == "secret"
        assert asked.raw_query == ""
        assert url == f"ws://{asked.headers['host']}{BROWSER}?cpuos_token=secret"
        assert asked.headers["host"].startswith("127.0.0.1:")
        published = [seen for seen in api.seen if seen.path == PORTS][-1]
        assert json.loads(published.body)["host"] == "localhost"


@pytest.mark.parametrize(
    "told",
    [
        {},
        [],
        {"webSocketDebuggerUrl": 7},
        {"webSocketDebuggerUrl": "ws://localhost:9222/"},
        {"webSocketDebuggerUrl": "ws://evil.example/elsewhere"},
        {"webSocketDebuggerUrl": "ws://localhost/devtools/browser/../../x"},
        {"webSocketDebuggerUrl": "ws://localhost/devtools/browser/" + "x" * 100},
        {"webSocketDebuggerUrl": "ws://[::1"},
        {"padding": "x" * 100_000},
    ],
)
def test_what_a_guest_says_of_its_browser_is_not_trusted(api: FakeApi, told: Any) -> None:
    with Sandbox.create() as sbx:
        api.preview = (200, told, {})
        with pytest.raises(PortProblem) as raised:
            sbx.ports.cdp_url(9222)
        assert raised.value.code == "port_answer_invalid"


def test_only_the_path_of_a_guests_url_is_taken_over(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        api.preview = (200, {"webSocketDebuggerUrl": f"ws://evil.example{BROWSER}?cpuos_token=x#y"}, {})
        url = sbx.ports.cdp_url(9222)
        assert url == f"ws://127.0.0.1:{api.port}{BROWSER}?cpuos_token=secret"


def test_refusals_of_the_preview_are_ours(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        body = {
            "error": {"code": "port_not_open", "what": "cannot reach port 9222", "why": "closed", "try": "start it"}
        }
        api.preview = (502, body, {"x-cpuos-error": "port_not_open"})
        with pytest.raises(PortProblem, match="cannot reach port 9222") as raised:
            sbx.ports.cdp_url(9222)
        assert raised.value.code == "port_not_open"
        api.preview = (502, body, {})  # the same said by the guest
        with pytest.raises(PortProblem) as raised:
            sbx.ports.cdp_url(9222)
        assert raised.value.code == "port_answer_invalid"
        api.preview = (401, {"error": {"code": "ticket_invalid"}}, {"x-cpuos-error": "ticket_invalid"})
        with pytest.raises(AuthenticationError):
            sbx.ports.cdp_url(9222)
