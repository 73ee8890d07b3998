"""A host without a way out: what the policy allows is refused at once, by a rule of its own, and so recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import SealedWorld, addresses
from refusals import told_refusals

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

TRY = """
import json, socket, sys, time
kind, place, port = json.loads(sys.argv[1])
began = time.monotonic()
try:
    if kind == "name":
        socket.getaddrinfo(place, port)
    elif kind == "udp":
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.connect((place, port)); made.settimeout(20); made.send(b"x"); made.recv(9)
    else:
        socket.create_connection((place, port), 20)
    print("reached")
except OSError as error:
    print(type(error).__name__)
assert time.monotonic() - began < 9
raise SystemExit(1)
"""


def attempt(sandbox: Sandbox, kind: str, place: str, port: int = 80) -> tuple[str, set[str]]:
    """What the program heard, and the rules that its result tells of."""
    done = told_refusals(lambda: sandbox.exec(["python3", "-c", TRY, json.dumps([kind, place, port])]))
    assert done.exit_code == 1, done.stderr
    return done.stdout.strip(), {one.rule for one in done.refused_connections}


def until(condition: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_without_an_uplink(sealed: SealedWorld) -> None:
    sealed.names.set("web.allowed.example", [addresses.WEB])
    sealed.clear()
    exceptions = [f"mirror.example={addresses.MIRROR}:8080"]
    values = {"network_uplink": "none", "network_exceptions": exceptions}
    with sealed.instance(runtime="gvisor", max_sandboxes=2, network_pool=1, **values) as instance:
        client = instance.client()
        with Sandbox.create(client=client, template="python") as sandbox:
            refused = ("ConnectionRefusedError", {"no uplink"})
            assert attempt(sandbox, "tcp", addresses.WEB) == refused
            assert attempt(sandbox, "tcp", addresses.WEB, 443) == refused
            assert attempt(sandbox, "udp", addresses.WEB, 5000) == refused
            assert attempt(sandbox, "tcp", addresses.MIRROR, 8080) == refused
            assert attempt(sandbox, "name", "web.allowed.example") == ("gaierror", {"no uplink"})
            assert attempt(sandbox, "name", "mirror.example") == ("gaierror", {"no uplink"})
            blocked = {"always blocked: link-local"}
            assert attempt(sandbox, "tcp", addresses.METADATA) == ("ConnectionRefusedError", blocked)
            sandbox.network.update(Network(allow=["*.allowed.example", addresses.WEB]))
            elsewhere = {"not in the sandbox allow list"}
            assert attempt(sandbox, "tcp", addresses.OTHER_WEB) == ("ConnectionRefusedError", elsewhere)
            assert attempt(sandbox, "name", "other.example") == ("gaierror", elsewhere)
            assert attempt(sandbox, "tcp", addresses.WEB) == refused
            assert attempt(sandbox, "name", "web.allowed.example") == ("gaierror", {"no uplink"})
            seen = sandbox.audit.connections()
            assert {one.verdict for one in seen} == {"refused"}
            assert all(one.kind != "gap" for one in seen)
            program = ["python3", "-c", TRY, json.dumps(["tcp", addresses.WEB, 80])]
            result = told_refusals(lambda: sandbox.exec(program))
            assert "no way out" in result.refused_connections[0].reason
    assert sealed.packets() == []
    assert sealed.names.queries() == []


def test_a_host_that_loses_its_way_out_and_gets_it_back(sealed: SealedWorld, sealed_instance) -> None:
    sealed.names.set("web.allowed.example", [addresses.WEB])
    way = sealed.run_in_host(["ip", "-4", "route", "show", "default"]).stdout.split()
    with Sandbox.create(client=sealed_instance.client(), template="python") as sandbox:
        assert attempt(sandbox, "tcp", addresses.WEB) == ("reached", set())
        sealed.run_in_host(["ip", "-4", "route", "del", "default"])
        try:
            until(lambda: attempt(sandbox, "tcp", addresses.WEB) == ("ConnectionRefusedError", {"no uplink"}))
            assert attempt(sandbox, "name", "web.allowed.example") == ("gaierror", {"no uplink"})
            with Sandbox.create(client=sealed_instance.client(), template="python") as later:
                assert attempt(later, "tcp", addresses.WEB) == ("ConnectionRefusedError", {"no uplink"})
        finally:
            assert sealed.run_in_host(["ip", "-4", "route", "add", *way]).returncode == 0
        until(lambda: attempt(sandbox, "tcp", addresses.WEB) == ("reached", set()))
        until(lambda: attempt(sandbox, "name", "web.allowed.example") == ("reached", set()))
