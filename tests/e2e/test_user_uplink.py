"""The uplink in user space: sandboxes reach what they may, by sockets of one process, and the host is as it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuos import Network, Result, Sandbox
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


HOLD = """
import socket, sys, time
made = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
made.settimeout(None)
made.sendall(b"x"); made.recv(1); print("held")
try:
    while made.send(b"x"):
        made.recv(1); time.sleep(0.05)
except OSError as error:
    print(type(error).__name__)
"""
FETCH = """
import socket, sys
made = socket.create_connection((sys.argv[1], 8080), 20)
made.sendall(b"GET /bytes/3000000 HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
while made.recv(1 << 16):
    pass
"""


def attempt(sandbox: Sandbox, kind: str, place: str, port: int = 80) -> str:
    return sandbox.exec(["python3", "-c", TRY, json.dumps([kind, place, port])]).stdout.strip()


def failing_attempt(sandbox: Sandbox, place: str) -> Result:
    """What it was refused is asked for however quick it is: of a quick command that succeeds it is not."""
    return sandbox.exec(["python3", "-c", f"{TRY}\nsys.exit(1)", json.dumps(["tcp", place, 80])])


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


def test_it_reaches_what_it_may_and_adds_nothing_to_the_host(sealed, instance, host_before):
    sealed.clear()
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        assert attempt(sandbox, "http", addresses.WEB) == "200"
        assert attempt(sandbox, "http", NAME) == "200"
        assert attempt(sandbox, "http", MIRROR, 8080) == "200"
        assert attempt(sandbox, "udp", addresses.WEB, 5000) == "1200"
        assert attempt(sandbox, "tcp", addresses.WEB, 81) == "ConnectionRefusedError"
        assert main_namespace(sealed) == host_before
    assert main_namespace(sealed) == host_before
    assert {seen.client for seen in sealed.connections()} == {addresses.HOST}


@pytest.mark.parametrize("address", [addresses.METADATA, addresses.MIRROR, *addresses.PRIVATE, addresses.HOST])
def test_special_ranges_and_the_host_are_refused_and_it_is_told(sealed, instance, address):
    sealed.clear()
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        ports = (80, instance.settings.api_port, instance.settings.gateway_port)
        assert [attempt(sandbox, "tcp", address, port) for port in ports] == ["ConnectionRefusedError"] * 3
        assert attempt(sandbox, "udp", address, 5000) == "ConnectionRefusedError"
        [told] = told_refusals(lambda: failing_attempt(sandbox, address)).refused_connections
        assert told.rule.startswith("always blocked")
    assert sealed.connections() == []


def test_an_exception_does_not_open_the_host_itself(sealed, instance):
    with sealed.in_host(lambda: socket.create_server(("0.0.0.0", 5000))) as server:
        server.settimeout(0)
        with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
            assert attempt(sandbox, "tcp", "self.example", 5000) == "ConnectionRefusedError"
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_list_and_its_change_hold_and_what_it_forbids_is_cut_on_both_sides(sealed, instance):
    network = Network(allow=["*.allowed.example", f"{addresses.OTHER_WEB}:5000"])
    with Sandbox.create(client=instance.client(), template="python", network=network) as sandbox:
        assert attempt(sandbox, "http", NAME) == "200"
        assert attempt(sandbox, "tcp", addresses.OTHER_WEB, 80) == "ConnectionRefusedError"
        assert attempt(sandbox, "http", MIRROR, 8080) != "200"
        held = sandbox.spawn(["python3", "-u", "-c", HOLD, addresses.OTHER_WEB, "5000"])
        wait_until(lambda: b"held" in held.output())
        assert worker_sockets(instance, addresses.OTHER_WEB) == 1
        sandbox.network.update(Network(allow=["*.allowed.example"]))
        assert "ConnectionResetError" in held.wait(timeout=30).stdout
        wait_until(lambda: worker_sockets(instance, addresses.OTHER_WEB) == 0)
        assert attempt(sandbox, "http", NAME) == "200"


def test_connections_are_recorded(sealed, instance):
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        assert attempt(sandbox, "http", addresses.WEB) == "200"
        assert attempt(sandbox, "tcp", addresses.METADATA, 81) == "ConnectionRefusedError"

        def recorded() -> set[tuple[str | None, int | None, str | None]]:
            found = {(one.address, one.port, one.verdict) for one in sandbox.audit.connections() if one.kind == "tcp"}
            return found if len(found) >= 2 else set()

        assert wait_until(recorded) == {(addresses.WEB, 80, "allowed"), (addresses.METADATA, 81, "refused")}


@pytest.mark.slow  # up to a minute: the kernel tells of ends, and so of bytes, in its own time
def test_connections_are_recorded_with_their_bytes(sealed, instance):
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        sandbox.exec(["python3", "-c", FETCH, addresses.WEB], check=True)
        attempt(sandbox, "tcp", addresses.WEB, 81)

        def recorded() -> dict[int | None, Any] | None:
            found = {one.port: one for one in sandbox.audit.connections()}
            over = [port for port, one in found.items() if one.ended_at is not None]
            return found if {8080, 81} <= set(over) else None

        found = wait_until(recorded, within_s=150)
        assert (found[8080].verdict, found[8080].address) == ("allowed", addresses.WEB)
        assert found[8080].bytes_received > 3_000_000
        assert 100 < found[8080].bytes_sent < 1_000_000
        assert all(one.kind != "gap" for one in found.values())


def test_the_end_of_a_sandbox_ends_its_connections(sealed, instance):
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        held = sandbox.spawn(["python3", "-u", "-c", HOLD, addresses.WEB, "5000"])
        wait_until(lambda: b"held" in held.output())
        assert worker_sockets(instance, addresses.WEB) == 1
    wait_until(lambda: worker_sockets(instance, addresses.WEB) == 0)


def test_it_is_an_ordinary_process_without_rights(instance):
    status = Path(f"/proc/{instance.helper('uplink')}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    assert "0" not in fields["Uid"].split()
    assert {fields[name].strip() for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"].strip() == "1"


def test_killed_it_lets_nothing_out_and_comes_back(sealed, instance):
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        assert attempt(sandbox, "http", addresses.WEB) == "200"
        killed = instance.helper("uplink")
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: attempt(sandbox, "http", addresses.WEB) == "200")
        assert instance.helper("uplink") not in (0, killed)
        instance.kill("node")
        sealed.clear()
        instance.wait_ready()
        assert attempt(sandbox, "http", addresses.WEB) == "200", "what is sent waits for the process to come up"
        assert attempt(sandbox, "tcp", addresses.METADATA, 80) == "ConnectionRefusedError"


@pytest.mark.slow  # half a minute: each is given a while to come up; test_network_uplink.py tells of "no uplink" too
def test_one_that_stays_away_is_no_uplink_and_it_is_told(sealed, instance):
    """Stopped, it answers nobody: the node kills it, and the next one too."""
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        assert attempt(sandbox, "http", addresses.WEB) == "200"
        with kept_down(instance):
            wait_until(lambda: attempt(sandbox, "tcp", addresses.WEB) == "ConnectionRefusedError", within_s=60)
            [told] = told_refusals(lambda: failing_attempt(sandbox, addresses.WEB)).refused_connections
            assert told.rule == "no uplink"
        wait_until(lambda: attempt(sandbox, "http", addresses.WEB) == "200", within_s=60)


@contextlib.contextmanager
def kept_down(instance: SealedInstance) -> Iterator[None]:
    """Whichever process comes up is killed."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            with contextlib.suppress(ProcessLookupError):
                if pid := instance.helper("uplink"):
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def worker_sockets(instance: SealedInstance, address: str) -> int:
    """How many connections to this address the uplink's process has."""
    pid = instance.helper("uplink")
    packed = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return len([words for words in map(str.split, lines) if words[2].startswith(packed) and words[3] == "01"])
