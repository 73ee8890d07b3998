"""The uplink in user space: sandboxes reach what they may, by sockets of one process, and the host is as it was."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses
from cpuos.testing.waiting import wait_until
from refusals import told_refusals

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

MIRROR = "mirror.example"
NAME = "web.allowed.example"
TRY = """
import json, socket, sys
kind, place, port = json.loads(sys.argv[1])
try:
    if kind == "udp":
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.connect((place, port)); made.settimeout(20); made.send(b"x" * 1200); print(len(made.recv(9999)))
    elif kind == "http":
        made = socket.create_connection((place, port), 20)
        made.sendall(f"GET /echo HTTP/1.1\\r\\nHost: {place}\\r\\nConnection: close\\r\\n\\r\\n".encode())
        print(made.makefile().readline().split()[1])
    else:
        socket.create_connection((place, port), 20); print("reached")
except OSError as error:
    print(type(error).__name__)
"""


def attempt(sandbox: Sandbox, kind: str, place: str, port: int = 80) -> str:
    return sandbox.exec(["python3", "-c", TRY, json.dumps([kind, place, port])]).stdout.strip()


def main_namespace(sealed: SealedWorld) -> list[str]:
    """All that an uplink could add to the host: links, addresses, rules, routes, tables, forwarding."""
    asked = ["ip -d link", "ip addr", "ip rule", "ip route show table all", "nft list ruleset"]
    asked.append("cat /proc/sys/net/ipv4/ip_forward")
    return [sealed.run_in_host(["sh", "-c", words]).stdout for words in asked]


@pytest.fixture(scope="module")
def host_before(sealed: SealedWorld) -> list[str]:
    return main_namespace(sealed)


@pytest.fixture(scope="module")
def instance(sealed: SealedWorld, host_before: list[str]) -> Iterator[SealedInstance]:
    sealed.names.set(NAME, [addresses.WEB])
    exceptions = [f"{MIRROR}={addresses.MIRROR}:8080", f"self.example={addresses.HOST}:5000"]
    values = {"network_uplink": "user", "network_exceptions": exceptions}
    with sealed.instance(max_sandboxes=4, network_pool=1, **values) as instance:
        yield instance


def test_it_reaches_what_it_may(sealed, instance, host_before):
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        assert attempt(sandbox, "http", addresses.WEB) == "200"
        assert attempt(sandbox, "http", NAME) == "200"
        assert attempt(sandbox, "http", MIRROR, 8080) == "200"
        assert attempt(sandbox, "udp", addresses.WEB, 5000) == "1200"
        assert attempt(sandbox, "tcp", addresses.WEB, 81) == "ConnectionRefusedError"
        assert main_namespace(sealed) == host_before
    assert main_namespace(sealed) == host_before
