"""Network policies of real sandboxes in a sealed world: what they open, change and refuse, and who may die then."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from cpuos import PIPE, Network, Sandbox
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

# Tries what is in its arguments and tells, one JSON line each, what came and how fast.
TRIES = """
import json, socket, sys, time
for kind, place, port in json.loads(sys.argv[1]):
    began = time.monotonic()
    try:
        if kind == "name":
            found = socket.getaddrinfo(place, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        elif kind == "udp":
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.settimeout(float(sys.argv[2]))
            made.connect((place, port))
            made.send(b"hello")
            found = made.recv(100).decode()
        else:
            socket.create_connection((place, port), float(sys.argv[2])).close()
            found = "connected"
    except OSError as error:
        found = type(error).__name__
    print(json.dumps([found, time.monotonic() - began]))
"""


def attempt(sandbox: Sandbox, *tries: tuple[str, str, int], slow: bool = False) -> list[str]:
    """What came of each; unless `slow`, nothing may take so long that a program seems to hang."""
    result = sandbox.exec(["python3", "-c", TRIES, json.dumps(tries), "3" if slow else "20"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == len(tries), (result.stdout, result.stderr)
    assert slow or all(spent < 9 for _, spent in rows), rows
    return [found for found, _ in rows]


def until(condition, *, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def world(sealed: SealedWorld) -> SealedWorld:
    sealed.names.set("web.allowed.example", [addresses.WEB])
    sealed.names.set("other.example", [addresses.OTHER_WEB])
    sealed.names.set("mirror.example", ["93.184.1.1"])
    return sealed


@pytest.fixture(scope="module")
def client(sealed_instance: SealedInstance, world: SealedWorld):
    return sealed_instance.client()


@pytest.fixture
def sandbox(client) -> Iterator[Sandbox]:
    with Sandbox.create(client=client, template="python") as sandbox:
        yield sandbox


def test_by_default_the_internet_is_open_and_the_rest_refused_at_once(world, sandbox):
    world.clear()
    assert attempt(sandbox, ("name", "web.allowed.example", 80), ("tcp", addresses.WEB, 443)) == [
        addresses.WEB,
        "connected",
    ]
    assert attempt(sandbox, ("udp", addresses.WEB, 5000)) == ["hello"]
    blocked = [*addresses.PRIVATE, addresses.METADATA, addresses.AZURE, addresses.HOST]
    refused = attempt(sandbox, *(("tcp", address, 80) for address in blocked))
    assert refused == ["ConnectionRefusedError"] * len(blocked)
    assert attempt(sandbox, ("tcp", addresses.MAIL, 25)) == ["ConnectionRefusedError"]
    reached = {packet.destination for packet in world.packets() if packet.protocol in ("tcp", "udp")}
    assert reached <= {addresses.WEB, *addresses.RESOLVERS}


def test_services_of_the_host_are_refused(world, sealed_instance, sandbox):
    """One that listens on every address of the host, and those of the instance."""
    settings = sealed_instance.settings
    with world.in_host(lambda: socket.create_server(("0.0.0.0", 9999))) as service:
        assert world.run_in_host(["python3", "-c", _CONNECT.format(address=addresses.HOST)]).returncode == 0
        tries = [
            ("tcp", address, port)
            for address in (addresses.HOST, "10.231.0.1", "10.231.0.2", "10.0.0.1")
            for port in (9999, settings.api_port, settings.gateway_port)
        ]
        assert set(attempt(sandbox, *tries)) == {"ConnectionRefusedError"}
        service.setblocking(False)
        service.accept()[0].close()  # the host's own try
        with pytest.raises(BlockingIOError):
            service.accept()


def test_an_address_that_the_host_gets_later_is_refused_too(world, sandbox):
    late = "80.90.100.77"
    world.run_in_host(["ip", "address", "add", f"{late}/24", "dev", "eth0"])
    try:
        # Until the node has seen it, the host's own table drops what comes.
        until(lambda: attempt(sandbox, ("tcp", late, 22), slow=True) == ["ConnectionRefusedError"])
    finally:
        world.run_in_host(["ip", "address", "del", f"{late}/24", "dev", "eth0"])


_CONNECT = "import socket; socket.create_connection(('{address}', 9999), 20)"


def test_two_sandboxes_do_not_reach_each_other(world, client, sealed_instance, sandbox):
    serve = "import http.server as h; h.HTTPServer(('0.0.0.0', 8000), h.BaseHTTPRequestHandler).serve_forever()"
    with Sandbox.create(client=client, template="python") as other:
        for one in (sandbox, other):
            one.spawn(["python3", "-c", serve])
        until(lambda: attempt(other, ("tcp", "127.0.0.1", 8000)) == ["connected"])
        slots = _slot_addresses(world, sealed_instance)
        assert len(slots) >= 2
        tries = [("tcp", address, port) for address in slots for port in (1, 8000)]
        assert set(attempt(sandbox, *tries)) == {"ConnectionRefusedError"}
        assert set(attempt(sandbox, *(("udp", address, 53) for address in slots))) == {"ConnectionRefusedError"}


def test_a_policy_changes_while_programs_run(world, client):
    with Sandbox.create(client=client, template="python", network="off") as sandbox:
        tries = (("tcp", addresses.WEB, 80), ("tcp", addresses.OTHER_WEB, 80), ("name", "web.allowed.example", 80))
        assert attempt(sandbox, *tries[:2]) == ["ConnectionRefusedError"] * 2
        assert attempt(sandbox, tries[2]) == ["gaierror"]
        sandbox.network.update("internet")
        assert attempt(sandbox, *tries) == ["connected", "connected", addresses.WEB]
        sandbox.network.update(Network(allow=[f"{addresses.WEB}:80"]))
        assert attempt(sandbox, *tries[:2]) == ["connected", "ConnectionRefusedError"]
        sandbox.network.update(Network(deny=[addresses.WEB]))
        assert attempt(sandbox, *tries[:2]) == ["ConnectionRefusedError", "connected"]


def test_a_change_cuts_what_it_forbids_and_nothing_else(world, sandbox):
    script = f"""
import socket, sys, time
kept = socket.create_connection(("{addresses.WEB}", 5000))
cut = socket.create_connection(("{addresses.OTHER_WEB}", 5000))
print("open", flush=True)
sys.stdin.readline()
for name, made in (("kept", kept), ("cut", cut)):
    made.settimeout(20)
    try:
        made.send(b"x"); print(name, made.recv(10), flush=True)
    except OSError as error:
        print(name, type(error).__name__, flush=True)
"""
    job = sandbox.spawn(["python3", "-c", script], stdin=PIPE)
    until(lambda: job.output() == b"open\n")
    sandbox.network.update(Network(deny=[f"{addresses.OTHER_WEB}:5000"]))
    job.write_stdin("go\n")
    said = job.wait(timeout=60).stdout
    assert "kept b'x'" in said
    assert "cut ConnectionResetError" in said


def test_a_killed_node_takes_the_newest_policy_up_again(world, client, sealed_instance):
    with Sandbox.create(client=client, template="python", network="internet") as sandbox:
        sandbox.network.update(Network(allow=["web.allowed.example", f"{addresses.OTHER_WEB}:80"]))
        sealed_instance.kill("node")
        # No node: what the kernel holds, holds.
        assert attempt(sandbox, ("tcp", addresses.OTHER_WEB, 80), ("tcp", addresses.WEB, 22)) == [
            "connected",
            "ConnectionRefusedError",
        ]
        sealed_instance.wait_ready()
        until(lambda: attempt(sandbox, ("name", "web.allowed.example", 80)) == [addresses.WEB])
        assert attempt(sandbox, ("name", "other.example", 80)) == ["gaierror"]
        assert attempt(sandbox, ("tcp", addresses.OTHER_WEB, 80), ("tcp", addresses.WEB, 22)) == [
            "connected",
            "ConnectionRefusedError",
        ]
        sandbox.network.update("off")
        assert attempt(sandbox, ("tcp", addresses.OTHER_WEB, 80)) == ["ConnectionRefusedError"]


@pytest.mark.parametrize("worker", ["dns", "peek", "records", "maker"])
def test_a_killed_helper_comes_back(world, client, sealed_instance, sandbox, worker):
    assert attempt(sandbox, ("name", "web.allowed.example", 80)) == [addresses.WEB]
    pid = sealed_instance.helper(worker)
    os.kill(pid, signal.SIGKILL)
    assert attempt(sandbox, ("tcp", addresses.PRIVATE[0], 80)) == ["ConnectionRefusedError"]
    until(lambda: sealed_instance.helper(worker) not in (0, pid))
    until(lambda: attempt(sandbox, ("name", "web.allowed.example", 80)) == [addresses.WEB])
    with Sandbox.create(client=client, template="python") as another:
        assert attempt(another, ("name", "web.allowed.example", 80)) == [addresses.WEB]


def test_an_exception_opens_one_service_where_the_policy_allows_it(world):
    exceptions = [f"mirror.example={addresses.MIRROR}:8080"]
    with world.instance(runtime="gvisor", max_sandboxes=2, network_pool=0, network_exceptions=exceptions) as instance:
        client = instance.client()
        with Sandbox.create(client=client, template="python") as sandbox:
            assert attempt(sandbox, ("name", "mirror.example", 80)) == [addresses.MIRROR], (
                "the forwarder answers itself"
            )
            tries = [("tcp", addresses.MIRROR, port) for port in (8080, 80)] + [("tcp", "10.77.0.6", 8080)]
            assert attempt(sandbox, *tries) == ["connected", "ConnectionRefusedError", "ConnectionRefusedError"]
            sandbox.network.update(Network(allow=[addresses.WEB]))
            assert attempt(sandbox, *tries) == ["ConnectionRefusedError"] * 3
            sandbox.network.update("off")
            assert attempt(sandbox, *tries) == ["ConnectionRefusedError"] * 3


def _slot_addresses(world: SealedWorld, instance: SealedInstance) -> list[str]:
    into = ["nsenter", f"--mount=/proc/{instance.pids()['node']}/ns/mnt"]
    into += ["nsenter", f"--net={instance.settings.run_dir}/netns/hub", "ip", "-4", "route"]
    rows = world.run_in_host(into).stdout.splitlines()
    return [row.split()[0] for row in rows if "dev u" in row]
