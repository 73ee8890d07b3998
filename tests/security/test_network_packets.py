"""Packets as a way out: root inside a real sandbox scans, floods, forges and mails, in a sealed world.

What a writer in the place of the sentry could put on the wire is tried in tests/unit/network/test_router_frames.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

NOBODYS = "93.200.0.1"


@pytest.fixture(scope="module")
def client(sealed_instance: SealedInstance):
    return sealed_instance.client()


@pytest.fixture(scope="module")
def free(client) -> Iterator[Sandbox]:
    with Sandbox.create(client=client, template="python") as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def neighbour(client) -> Iterator[Sandbox]:
    with Sandbox.create(client=client, template="python") as sandbox:
        yield sandbox


@pytest.fixture
def listed(client) -> Iterator[Sandbox]:
    with Sandbox.create(client=client, template="python", network=Network(allow=[f"{addresses.WEB}:80"])) as sandbox:
        yield sandbox


@pytest.fixture(autouse=True)
def _clear(sealed: SealedWorld) -> None:
    """What an earlier test left behind, the last packets of a connection, has come to its end."""

    def is_quiet() -> bool:
        sealed.clear()
        time.sleep(0.2)
        return not sealed.packets()

    wait_until(is_quiet)


def as_root(sandbox: Sandbox, program: str) -> list:
    """What it prints, each line JSON."""
    result = sandbox.exec(["python3", "-c", program], user="root", timeout=90)
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def reached(world: SealedWorld) -> set[tuple[str, str]]:
    """(protocol, address) of all that arrived on the internet, but for the questions of the forwarder."""
    return {(p.protocol, p.destination) for p in world.packets() if p.destination not in addresses.RESOLVERS}


def connects(sandbox: Sandbox, address: str = addresses.WEB, port: int = 80) -> bool:
    code = f"import socket; socket.create_connection(('{address}', {port}), 20)"
    return sandbox.exec(["python3", "-c", code]).exit_code == 0


RAW = f"""
import json, socket, struct
def forged(source, target, protocol):
    body = struct.pack("!HHHH", 4000, 5000, 8, 0)
    return struct.pack("!BBHHHBBH4s4s", 69, 0, 28, 1, 0, 64, protocol, 0,
        socket.inet_aton(source), socket.inet_aton(target)) + body
tries = [("10.0.0.2", "{NOBODYS}", number) for number in (2, 4, 41, 47, 50, 89, 132, 136)]
tries += [(source, "{NOBODYS}", 17) for source in ("10.0.0.1", "10.0.0.3", "8.8.8.8", "127.0.0.1", "{addresses.HOST}")]
for source, target, protocol in tries:
    try:
        made = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        print(json.dumps(made.sendto(forged(source, target, protocol), (target, 0))))
    except OSError as error:
        print(json.dumps(type(error).__name__))
for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
    try:
        made = socket.socket(socket.AF_PACKET, kind, 0)
        made.bind(("eth0", 0x800))
        print(json.dumps(made.send(bytes(60))))
    except OSError as error:
        print(json.dumps(type(error).__name__))
"""


def test_forged_packets_of_root_reach_nobody(sealed, free):
    assert len(as_root(free, RAW)) == 15
    assert reached(sealed) == set()
    assert connects(free)


CHANGED = f"""
import fcntl, json, socket, struct
made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
changes = 0
for address in ("10.0.0.3", "10.231.0.9", "{addresses.HOST}", "8.8.8.8"):
    request = struct.pack("16sH2s4s8x", b"eth0", socket.AF_INET, b"", socket.inet_aton(address))
    try:
        fcntl.ioctl(made, 0x8916, request)  # SIOCSIFADDR
        changes += 1
    except OSError:
        pass
    for bound in (address, ""):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            one.bind((bound, 4001))
            one.sendto(b"x", ("{NOBODYS}", 5000))
        except OSError:
            pass
        one.close()
print(json.dumps(changes))
"""


def test_another_address_of_ones_own_reaches_nobody(sealed, client, neighbour):
    """Whether the sentry lets root take one or not. What is sent from the right address arrives, as it may."""
    with Sandbox.create(client=client, template="python") as sandbox:
        as_root(sandbox, CHANGED)
    sources = {packet.source for packet in sealed.packets()}
    assert sources <= {addresses.HOST}
    assert connects(neighbour)


STRAYS = f"""
import json, socket
tries = [("224.0.0.251", 5353), ("239.255.255.250", 1900), ("255.255.255.255", 67), ("10.0.0.3", 137)]
for address, port in tries:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    try:
        made.sendto(b"x", (address, port))
    except OSError:
        pass
literals = ["2606:2800:220:1::1", "fe80::1%eth0", "ff02::fb%eth0", "::ffff:10.20.30.40", "::ffff:{addresses.METADATA}"]
for address in literals:
    try:
        made = socket.create_connection((address, 80), 2)
        print(json.dumps([address, "connected"]))
    except OSError as error:
        print(json.dumps([address, type(error).__name__]))
"""


def test_multicast_broadcast_and_ipv6_reach_nobody(sealed, free):
    heard = as_root(free, STRAYS)
    assert len(heard) == 5
    assert "connected" not in [word for _, word in heard]
    assert reached(sealed) == set()


MAIL = f"""
import json, socket
for port in (25, 465, 587):
    try:
        socket.create_connection(("{addresses.MAIL}", port), 20)
        print(json.dumps("connected"))
    except OSError as error:
        print(json.dumps(type(error).__name__))
"""


def test_no_mail_leaves(sealed, free):
    assert as_root(free, MAIL) == ["ConnectionRefusedError"] * 3
    assert reached(sealed) == set()


SCAN = """
import json, select, socket, time
began, poll, opened, refused = time.monotonic(), select.poll(), {}, 0
for number in range(2000):
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex((PLACE % (number >> 8, number & 255), 2000 + number % 50))
    opened[made.fileno()] = made
    poll.register(made, select.POLLOUT)
    if len(opened) > 200:
        for fd, _ in poll.poll(0):
            refused += opened[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            poll.unregister(fd)
            opened.pop(fd).close()
deadline = time.monotonic() + 40
while opened and time.monotonic() < deadline:
    for fd, _ in poll.poll(100):
        refused += opened[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        poll.unregister(fd)
        opened.pop(fd).close()
print(json.dumps([refused, time.monotonic() - began]))
"""


def test_a_scan_of_the_private_network_finds_nothing(sealed, free):
    """And is answered at once, so that an honest program with a wrong address does not hang."""
    [[refused, spent]] = as_root(free, SCAN.replace("PLACE", "'10.20.%d.%d'"))
    assert refused == 2000
    assert spent < 60
    assert reached(sealed) == set()


def test_a_scan_of_the_internet_is_slowed_down(sealed, client, neighbour):
    with Sandbox.create(client=client, template="python") as sandbox:
        began = time.monotonic()
        as_root(sandbox, SCAN.replace("PLACE", "'93.201.%d.%d'"))
        spent = time.monotonic() - began
        tried = {p.destination for p in sealed.packets() if p.destination.startswith("93.201.")}
        assert len(tried) <= 400 + 200 * spent + 1, "a burst, and so many a second"
        assert connects(neighbour), "each has an allowance of its own"


HOARD = f"""
import json, resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
kept, refused = [], 0
for number in range(700):
    try:
        kept.append(socket.create_connection(("{addresses.WEB}", 5000), 20))
    except ConnectionRefusedError:
        refused += 1
print(json.dumps([len(kept), refused]))
import sys; sys.stdout.flush()
sys.stdin.readline()
"""


def test_a_hoard_of_connections_has_an_end(sealed, client, neighbour):
    """What is over it is refused at once; the sandbox stays in hand, its neighbour and names unharmed."""
    with Sandbox.create(client=client, template="python") as sandbox:
        [[kept, refused]] = as_root(sandbox, HOARD)
        assert kept + refused == 700
        assert 400 <= kept <= 513
        assert connects(neighbour)


FLOOD = f"""
import json, socket, time
made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
made.connect(("{NOBODYS}", 5001))
began, sent = time.monotonic(), 0
while time.monotonic() - began < 3:
    for _ in range(200):
        try:
            made.send(b"x" * 100)
            sent += 1
        except OSError:
            pass
print(json.dumps(sent))
"""


def test_a_flood_hurts_only_its_sandbox(sealed, client, neighbour):
    with Sandbox.create(client=client, template="python") as sandbox:
        job = sandbox.spawn(["python3", "-c", FLOOD])
        while True:
            assert connects(neighbour)
            if sealed.packets():
                break
        assert sandbox.exec("true").exit_code == 0, "commands go another way"
        job.wait(timeout=60)


QUIC_AND_PING = f"""
import json, socket
for address, port in (("{addresses.WEB}", 443), ("{addresses.WEB}", 80), ("{NOBODYS}", 443)):
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(20)
    try:
        made.connect((address, port))
        made.send(b"\\xc0\\0\\0\\0\\1" + bytes(1195))
        made.recv(10)
        print(json.dumps("answered"))
    except OSError as error:
        print(json.dumps(type(error).__name__))
"""


def test_in_an_allow_list_there_is_no_other_way(sealed, listed):
    assert as_root(listed, QUIC_AND_PING)[::2] == ["ConnectionRefusedError"] * 2
    ping = listed.exec(["python3", "-c", PING.format(address=NOBODYS)], user="root")
    assert ping.stdout.strip() != "answered"
    assert ("icmp", NOBODYS) not in reached(sealed)
    assert ("udp", NOBODYS) not in reached(sealed)
    assert connects(listed)
    assert not connects(listed, NOBODYS)


PING = """
import socket, struct
try:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    made.settimeout(2)
    made.sendto(struct.pack("!BBHHH", 8, 0, 0xf7ff, 0, 0), ("{address}", 0))
    made.recv(100)
    print("answered")
except OSError as error:
    print(type(error).__name__)
"""
