"""Attacks on the moments between: while a policy changes, behind what the router sees, and on the records."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuos import PIPE, Network, Sandbox
from cpuos.errors import CpuosError
from cpuos.node.network.conntrack import ConntrackSocket
from cpuos.node.network.namespaces import inside
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

NAME = "a.allowed.example"


@pytest.fixture(scope="module")
def client(sealed: SealedWorld, sealed_instance: SealedInstance):
    sealed.names.set(NAME, [addresses.WEB])
    return sealed_instance.client()


@pytest.fixture
def sandbox(client) -> Iterator[Sandbox]:
    with Sandbox.create(client=client, template="python") as made:
        yield made


def until(condition: Callable[[], Any], *, limit_s: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


# Opens connections and sends datagrams until it is told to stop, and says when each began and ended and whether it was
# answered.
KNOCK = f"""
import json, socket, sys, threading, time
tries, stop = [], threading.Event()
def tcp():
    while not stop.is_set():
        began, passed = time.time(), True
        try:
            socket.create_connection(("{addresses.WEB}", 5000), 1).close()
        except OSError:
            passed = False
        tries.append(("tcp", round(began, 4), round(time.time(), 4), passed))
        time.sleep(0.002)
def udp():
    made, number = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0
    made.settimeout(0.2)
    made.connect(("{addresses.WEB}", 5000))
    while not stop.is_set():
        number += 1
        began, passed = time.time(), True
        try:
            made.send(b"%d" % number)
            while made.recv(100) != b"%d" % number:
                pass
        except OSError:
            passed = False
        tries.append(("udp", round(began, 4), round(time.time(), 4), passed))
        time.sleep(0.002)
knocking = [threading.Thread(target=one) for one in (tcp, tcp, udp, udp)]
for one in knocking:
    one.start()
print("begun", flush=True)
sys.stdin.readline()
stop.set()
for one in knocking:
    one.join()
print(json.dumps(tries))
"""


def test_nothing_passes_once_a_change_has_returned(sandbox):
    """Neither a new connection nor another datagram of a flow that was open."""
    job = sandbox.spawn(["python3", "-c", KNOCK], stdin=PIPE, max_output="64MiB")
    until(lambda: b"begun" in job.output())
    closed = []
    for _ in range(12):
        sandbox.network.update("off")
        since = time.time()
        time.sleep(0.1)
        closed.append((since, time.time()))
        sandbox.network.update("internet")
        time.sleep(0.05)
    job.write_stdin("stop\n")
    tries = json.loads(job.wait(timeout=60).stdout.splitlines()[-1])
    # One that was still on its way when all was open again may have passed then.
    held = Counter(
        (kind, passed)
        for kind, began, ended, passed in tries
        for since, to in closed
        if since + 0.002 < began and ended < to
    )
    assert held["tcp", False] > 10
    assert held["udp", False] > 10
    assert (held["tcp", True], held["udp", True]) == (0, 0)
    assert {kind for kind, *_, passed in tries if passed} == {"tcp", "udp"}, "in between both pass"


def test_a_node_killed_within_a_change_holds_the_newest_policy(client, sealed_instance):
    ports = (80, 22, 5000)
    code = f"""
import socket
for port in {ports}:
    try:
        socket.create_connection(("{addresses.WEB}", port), 3)
        print(port)
    except OSError:
        pass
"""
    chance = random.Random(7)
    with Sandbox.create(client=client, template="python", network="off") as sandbox:
        for port in ports:
            change = threading.Thread(target=_change, args=(sandbox, Network(allow=[f"{addresses.WEB}:{port}"])))
            change.start()
            time.sleep(chance.uniform(0, 0.05))
            sealed_instance.kill("node")
            sealed_instance.wait_ready()
            change.join()
            until(lambda: sandbox.network.get().applied or sandbox.refresh().state != "running", limit_s=90)
            assert sandbox.state == "running", sandbox.info
            assert sandbox.exec(["python3", "-c", code]).stdout.split() == [str(port)]


def _change(sandbox: Sandbox, network: Network) -> None:
    try:
        sandbox.network.update(network)
    except CpuosError:
        pass  # the node died first: it is put in place later


# Ends each connection by a reset that goes no further than the first router.
END_UNSEEN = """
import json, socket, struct
opened = 0
while opened < 150:
    made = socket.create_connection(("93.190.0.%d" % (1 + opened), 80), 20)
    made.setsockopt(socket.SOL_IP, socket.IP_TTL, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()
    opened += 1
"""


def test_no_connection_stays_behind_in_the_hosts_tables(sealed, sealed_instance, sandbox):
    """Open in the tables of hub and host for five days, and free in the router: so one sandbox filled the host's."""
    result = sandbox.exec(["python3", "-c", END_UNSEEN], user="root", timeout=60)
    assert result.exit_code == 0, result.stderr
    run = sealed_instance.settings.run_dir
    hub = Path(f"/proc/{sealed_instance.pids()['node']}/root{run}/netns/hub")
    for place in (hub, sealed.host):
        until(lambda place=place: not inside(place, _left_open))


def _left_open() -> list[str]:
    with ConntrackSocket() as table:
        return [str(flow.address) for flow in table.flows() if str(flow.address).startswith("93.190.0.")]


ASK_ON = r"""
import socket, struct, sys
def ask(name):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    data = struct.pack(">6H", 77, 256, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", 1, 1)
    made.sendall(struct.pack(">H", len(data)) + data)
    size = int.from_bytes(made.recv(2, socket.MSG_WAITALL), "big")
    return made.recv(size, socket.MSG_WAITALL)[3] & 15
made = socket.create_connection(("10.0.0.1", 53), 20)
print(ask(sys.argv[1]), flush=True)
sys.stdin.readline()
print(ask(sys.argv[1]), ask("other.example"))
"""


def test_a_kept_connection_to_the_forwarder_obeys_the_new_policy(sealed, sandbox):
    job = sandbox.spawn(["python3", "-c", ASK_ON, NAME], stdin=PIPE)
    until(lambda: job.output() == b"0\n")
    sandbox.network.update("off")
    sealed.clear()
    job.write_stdin("again\n")
    job.close_stdin()
    assert job.wait(timeout=60).stdout.split() == ["0", "5", "5"]
    assert sealed.names.queries() == []


BEGIN_SLOWLY = f"""
import socket, threading, time
stop, held = time.time() + 8, []
def begin(port, first):
    while time.time() < stop:
        try:
            made = socket.create_connection(("{addresses.WEB}", port), 2)
            held.append(made)
            made.send(first)
        except OSError:
            time.sleep(0.02)
def drip():
    while time.time() < stop:
        for made in list(held):
            try:
                made.send(b"\\1")
            except OSError:
                held.remove(made)
ways = [(443, b"\\x16\\3\\1\\0\\xf0\\1"), (80, b"GET / HT")] * 3
working = [threading.Thread(target=begin, args=way) for way in ways] + [threading.Thread(target=drip)]
for one in working:
    one.start()
print("begun", flush=True)
for one in working:
    one.join()
"""
ASK_OFTEN = f"""
import http.client, time
for _ in range(20):
    began = time.time()
    made = http.client.HTTPConnection("{addresses.WEB}", 80, timeout=30)
    made.request("GET", "/", headers={{"Host": "{NAME}"}})
    assert made.getresponse().status == 200
    print(time.time() - began)
"""


def test_hundreds_of_slow_beginnings_hurt_only_their_sandbox(client):
    network = Network(allow=["*.allowed.example"])
    with (
        Sandbox.create(client=client, template="python", network=network) as bad,
        Sandbox.create(client=client, template="python", network=network) as neighbour,
    ):
        for one in (bad, neighbour):
            assert one.exec(["getent", "hosts", NAME]).exit_code == 0
        job = bad.spawn(["python3", "-c", BEGIN_SLOWLY])
        until(lambda: job.output() == b"begun\n")
        result = neighbour.exec(["python3", "-c", ASK_OFTEN], timeout=90)
        assert result.exit_code == 0, result.stderr
        assert sorted(map(float, result.stdout.split()))[10] < 4
        job.kill()


FLOOD = """
import json, socket, threading, time
refused, stop = [0] * 6, time.time() + 3
def knock(own):
    number = 0
    while time.time() < stop or sum(refused) <= 1000:
        number += 1
        try:
            socket.create_connection((f"10.{number % 250}.{number // 250 % 250}.{own}", 1 + number % 60000), 2)
        except ConnectionRefusedError:
            refused[own] += 1
knocking = [threading.Thread(target=knock, args=(own,)) for own in range(6)]
for one in knocking:
    one.start()
for one in knocking:
    one.join()
print(sum(refused))
"""


def test_a_flood_of_refusals_is_counted_to_the_last(client):
    """Most are not written one by one: the gap says how many those were."""
    with Sandbox.create(client=client, template="python") as sandbox:
        refused = int(sandbox.exec(["python3", "-c", FLOOD], timeout=60).stdout)
    assert refused > 1000
    rows = until(lambda: [one for one in sandbox.audit.connections() if one.kind == "gap"] and _all(sandbox))
    assert sum(one.count for one in rows) == refused
    assert len(rows) < 1000


def _all(sandbox: Sandbox) -> list[Any]:
    return list(sandbox.audit.connections())
