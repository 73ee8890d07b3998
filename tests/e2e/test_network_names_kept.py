"""A name that was looked up stays open when the forwarder or the node is made anew; nothing is asked again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

NAME = "web.allowed.example"
ASK = "import socket; print(socket.gethostbyname('web.allowed.example'))"
GET = f"""
import socket
made = socket.create_connection(("{addresses.WEB}", 80), 30)
made.settimeout(30)
made.sendall(b"GET / HTTP/1.1\\r\\nHost: {NAME}\\r\\nConnection: close\\r\\n\\r\\n")
print(made.recv(12).decode())
"""
CONNECT = f"import socket; socket.create_connection(('{addresses.WEB}', 5000), 30); print('connected')"


def run(sandbox: Sandbox, code: str) -> str:
    return sandbox.exec(["python3", "-c", code]).stdout.strip()


def asked(world: SealedWorld) -> list[str]:
    return [query["name"].rstrip(".") for query in world.names.queries()]


@pytest.fixture
def sandbox(sealed: SealedWorld, sealed_instance: SealedInstance) -> Iterator[Sandbox]:
    sealed.names.set(NAME, [addresses.WEB], ttl=300)
    policy = Network(allow=["*.allowed.example"])
    with Sandbox.create(client=sealed_instance.client(), template="python", network=policy) as sandbox:
        assert run(sandbox, ASK) == addresses.WEB
        assert run(sandbox, GET) == "HTTP/1.1 200"
        sealed.clear()
        yield sandbox


def test_over_a_restart_of_the_node(sealed, sealed_instance, sandbox):
    sealed_instance.kill("node")
    sealed_instance.wait_ready()
    wait_until(lambda: run(sandbox, GET) == "HTTP/1.1 200")  # the reader of names may still be on its way
    sandbox.network.update(Network(allow=[NAME]))
    wait_until(lambda: run(sandbox, GET) == "HTTP/1.1 200")  # workers that were begun anew refuse until they are told
    assert asked(sealed) == []
    newest = [one for one in sandbox.audit.connections(verdict="allowed") if one.port == 80][-1]
    assert (newest.name, newest.rule) == (NAME, f"sandbox allow {NAME}")
    sandbox.network.update(Network(allow=["else.example"]))
    assert run(sandbox, GET) == ""


def test_over_a_death_of_the_forwarder_and_a_change(sealed, sealed_instance, sandbox):
    killed = sealed_instance.helper("dns")
    os.kill(killed, signal.SIGKILL)
    sandbox.network.update(Network(allow=[NAME, "more.example"]))
    wait_until(lambda: run(sandbox, GET) == "HTTP/1.1 200")
    wait_until(lambda: sealed_instance.helper("dns") not in (0, killed))
    wait_until(lambda: run(sandbox, ASK) == addresses.WEB)
    sandbox.network.update(Network(allow=["*.allowed.example"]))
    assert run(sandbox, GET) == "HTTP/1.1 200"


def test_what_a_denied_name_stands_for_stays_closed(sealed, sealed_instance):
    sealed.names.set(NAME, [addresses.WEB], ttl=300)
    client = sealed_instance.client()
    with Sandbox.create(client=client, template="python", network=Network(deny=[f"{NAME}:5000"])) as sandbox:
        assert run(sandbox, CONNECT) == "connected", "nobody has asked for the name yet"
        assert run(sandbox, ASK) == addresses.WEB
        assert run(sandbox, CONNECT) == ""
        sealed_instance.kill("node")
        assert run(sandbox, CONNECT) == ""
        sealed_instance.wait_ready()
        assert run(sandbox, CONNECT) == ""
