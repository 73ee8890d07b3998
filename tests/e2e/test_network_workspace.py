"""The policy of the workspace, set by SDK and command line, on real sandboxes in a sealed world."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cpuos import Network, Sandbox
from cpuos.errors import InvalidRequest
from cpuos.testing.sealed import addresses
from refusals import told_refusals

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

CPUOS = str(Path(sys.executable).parent / "cpuos")


def connect(sandbox: Sandbox, address: str) -> str:
    code = f"import socket; socket.create_connection(('{address}', 80), 20); print('connected')"
    done = told_refusals(lambda: sandbox.exec(["python3", "-c", code]))
    return done.stdout.strip() or done.refused_connections[0].rule


@pytest.fixture
def client(sealed_instance):
    with sealed_instance.client() as client:
        yield client
        client.network.update("internet")  # the instance is other tests' too


def test_it_holds_for_a_running_sandbox_and_for_the_next(sealed, client):
    with Sandbox.create(client=client, template="python", network=Network(deny=[addresses.OTHER_WEB])) as running:
        assert connect(running, addresses.WEB) == "connected"
        assert client.network.update(Network(deny=[addresses.WEB])).policy.deny == [addresses.WEB]
        assert connect(running, addresses.WEB) == f"workspace deny {addresses.WEB}"
        assert connect(running, addresses.OTHER_WEB) == f"sandbox deny {addresses.OTHER_WEB}"
        with Sandbox.create(client=client, template="python") as next_one:
            assert connect(next_one, addresses.WEB) == f"workspace deny {addresses.WEB}"
        client.network.update("internet")
        assert connect(running, addresses.WEB) == "connected"


def test_what_is_always_blocked_is_refused_by_name(sealed_instance, client):
    line = [CPUOS, "net", "--workspace", "--allow", "10.0.0.0/8"]
    done = subprocess.run(line, capture_output=True, env=sealed_instance.environment(), timeout=120, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "cannot allow 10.0.0.0/8: always blocked (private)"
    assert done.stderr.splitlines()[2] == "try: cpuos doctor"
    with pytest.raises(InvalidRequest, match="localhost"):
        Sandbox.create(client=client, network=Network(allow=["localhost"]))
    assert client.network.get().policy.allow == []


def test_by_the_command_line(sealed, sealed_instance, client):
    def net(*arguments: str) -> dict:
        line = [CPUOS, "net", "--workspace", *arguments, "--json"]
        done = subprocess.run(line, capture_output=True, env=sealed_instance.environment(), timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)["policy"]

    with Sandbox.create(client=client, template="python") as sandbox:
        changed = net("--allow", f"{addresses.OTHER_WEB}:80")
        assert changed == {"mode": "allowlist", "allow": [f"{addresses.OTHER_WEB}:80"], "deny": []}
        assert net() == changed
        assert connect(sandbox, addresses.WEB) == "not in the workspace allow list"
        assert connect(sandbox, addresses.OTHER_WEB) == "connected"
