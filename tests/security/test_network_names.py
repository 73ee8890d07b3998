"""Names as a way out, or in: rebinding, tunnels, other resolvers. Real sandboxes in a sealed world."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

ROUTER = "10.0.0.1"
ALLOW = Network(allow=["*.allowed.example"])
NOERROR, SERVFAIL, NXDOMAIN, REFUSED = 0, 2, 3, 5

# Asks as any program could, byte by byte.
# [transport, server, name, type] → [rcode or the name of an error, addresses, words, seconds]
ASK = r"""
import json, socket, struct, sys, time
def skip(data, at):
    while data[at]:
        if data[at] >= 192:
            return at + 2
        at += 1 + data[at]
    return at + 1
def read(data):
    _, flags, questions, *counts = struct.unpack_from(">6H", data)
    at, found, words = 12, [], ""
    for _ in range(questions):
        at = skip(data, at) + 4
    for _ in range(sum(counts)):
        at = skip(data, at)
        kind, _, _, length = struct.unpack_from(">HHIH", data, at)
        body = data[at + 10 : at + 10 + length]
        at += 10 + length
        if kind == 1:
            found.append(socket.inet_ntoa(body))
        elif kind == 41 and len(body) > 6:
            words = body[6:].decode()
    return [flags & 15, sorted(found), words]
def ask(transport, server, name, kind, limit_s):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    data = struct.pack(">6H", 77, 256, 1, 0, 0, 1) + labels + b"\0" + struct.pack(">HH", kind, 1)
    data += struct.pack(">BHHIH", 0, 41, 1232, 0, 0)
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM)
    made.settimeout(limit_s)
    with made:
        made.connect((server, 53))
        if transport == "tcp":
            made.sendall(struct.pack(">H", len(data)) + data)
            size = int.from_bytes(made.recv(2, socket.MSG_WAITALL), "big")
            return read(made.recv(size, socket.MSG_WAITALL))
        made.send(data)
        return read(made.recv(4096))
for given in json.loads(sys.argv[1]):
    began = time.monotonic()
    try:
        answer = ask(*given)
    except OSError as error:
        answer = [type(error).__name__, [], ""]
    print(json.dumps([*answer, time.monotonic() - began]))
"""


# 600 new names in about four seconds.
TUNNEL = r"""
import socket, time
made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
made.connect(("10.0.0.1", 53))
for number in range(600):
    label = b"chunk%03d" % number
    made.send(bytes.fromhex("004d01000001000000000000") + b"\x08" + label + b"\7allowed\7example\0\0\x10\0\1")
    time.sleep(0.0066)
"""


def ask(sandbox: Sandbox, *questions: tuple, server: str = ROUTER, limit_s: float = 20) -> list[tuple]:
    """(rcode, addresses, words) of each (name, type[, transport])."""
    given = [[(*rest, "udp")[0], server, name, kind, limit_s] for name, kind, *rest in questions]
    result = sandbox.exec(["python3", "-c", ASK, json.dumps(given)])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == len(questions), (result.stdout, result.stderr)
    assert all(row[3] < 9 or row[0] == "TimeoutError" for row in rows), rows
    return [tuple(row[:3]) for row in rows]


def addresses_of(sandbox: Sandbox, name: str) -> list[str]:
    return ask(sandbox, (name, 1))[0][1]


def until(condition, *, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def connects(sandbox: Sandbox, address: str, port: int = 443) -> bool:
    code = f"import socket; socket.create_connection(('{address}', {port}), 20)"
    return sandbox.exec(["python3", "-c", code]).exit_code == 0


@pytest.fixture(scope="module")
def world(sealed: SealedWorld) -> SealedWorld:
    sealed.names.set("web.allowed.example", [addresses.WEB])
    sealed.names.set("open.example", [addresses.OTHER_WEB])
    return sealed


@pytest.fixture(scope="module")
def client(sealed_instance: SealedInstance, world: SealedWorld):
    return sealed_instance.client()


@pytest.fixture(scope="module")
def listed(client) -> Iterator[Sandbox]:
    """With an allow list."""
    with Sandbox.create(client=client, template="python", network=ALLOW) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def free(client) -> Iterator[Sandbox]:
    """With the internet."""
    with Sandbox.create(client=client, template="python") as sandbox:
        yield sandbox


@pytest.mark.parametrize("address", [*addresses.PRIVATE, addresses.METADATA, addresses.AZURE, addresses.HOST])
def test_a_name_that_turns_to_a_blocked_address(world, listed, free, address):
    """TTL 0: the first answer is harmless, each later one points inside."""
    name = f"r{address.replace('.', '-')}.allowed.example"
    for sandbox in (listed, free):
        world.names.set(name, [[addresses.WEB], [address], [address, addresses.WEB]], ttl=0)
        assert addresses_of(sandbox, name) == [addresses.WEB]
        rcode, found, words = ask(sandbox, (name, 1))[0]
        assert (rcode, found) == (REFUSED, [])
        assert words.startswith("cpuos network policy: always blocked: ")
        assert addresses_of(sandbox, name) == [addresses.WEB]
        assert not connects(sandbox, address, 80)


def test_an_alias_into_the_private_network(world, listed, free):
    world.names.set("alias.allowed.example", ["inside.evil.example."], kind="CNAME")
    world.names.set("inside.evil.example", [addresses.PRIVATE[0]])
    for sandbox in (listed, free):
        assert ask(sandbox, ("alias.allowed.example", 1))[0] == (
            REFUSED,
            [],
            "cpuos network policy: always blocked: private",
        )


def test_an_allowed_name_that_moves(world, listed):
    name = "moving.allowed.example"
    world.names.set(name, [["93.184.1.10"], ["93.184.1.11"]], ttl=0)
    assert not connects(listed, "93.184.1.10")
    assert addresses_of(listed, name) == ["93.184.1.10"]
    assert addresses_of(listed, name) == ["93.184.1.11"]


def test_in_an_allow_list_no_question_for_another_name_leaves_the_host(world, listed):
    world.clear()
    secret = "0123456789abcdef" * 3
    questions = [(f"{secret}.{n}.evil.example", kind) for n in range(5) for kind in (1, 5, 10, 16, 28, 65, 255)]
    questions += [(f"{secret}.evil.example", 16, "tcp"), ("allowed.example", 1), ("xallowed.example", 1)]
    assert {row[0] for row in ask(listed, *questions)} == {REFUSED}
    assert ask(listed, ("web.allowed.example", 1))[0][1] == [addresses.WEB]
    assert {query["name"] for query in world.names.queries()} <= {"web.allowed.example"}
    assert b"0123456789abcdef" not in json.dumps(world.names.queries()).encode()


def test_tunnels_through_an_allowed_name_are_narrow(world, free, listed):
    """Types that carry anything are refused, long names too, and new names have a rate."""
    world.clear()
    for sandbox in (free, listed):
        kinds = ask(sandbox, *(("web.allowed.example", kind) for kind in (10, 251, 252, 255, 65399)))
        assert {row[0] for row in kinds} == {REFUSED}
        long = ".".join(["x" * 60] * 3 + ["y" * 20, "allowed.example"])
        assert ask(sandbox, (long, 1))[0][0] == REFUSED
    assert world.names.queries() == []
    # Paced below what the kernel lets through: what is counted here is the forwarder's own rate.
    began = time.monotonic()
    free.exec(["python3", "-c", TUNNEL], check=True)
    spent = time.monotonic() - began
    assert 150 < len(world.names.queries()) <= 200 + 50 * spent + 5


def test_other_resolvers_are_closed_where_names_decide(world, listed, free):
    world.clear()
    for server in (*addresses.RESOLVERS, addresses.WEB):
        for transport in ("udp", "tcp"):
            rcode, *_ = ask(listed, ("web.allowed.example", 1, transport), server=server)[0]
            assert rcode == "ConnectionRefusedError"
    assert not connects(listed, addresses.RESOLVERS[0], 853)
    assert world.names.queries() == []
    assert ask(free, ("open.example", 1), server=addresses.RESOLVERS[0])[0][1] == [addresses.OTHER_WEB]


def test_neighbours_of_the_host_are_not_asked(world, free):
    """mDNS, LLMNR, NetBIOS, and names that only a network near the host knows."""
    world.clear()
    for group, port in (("224.0.0.251", 5353), ("224.0.0.252", 5355), ("10.0.0.3", 137), ("255.255.255.255", 67)):
        code = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
            "s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); s.settimeout(1);"
            f"s.sendto(b'x' * 40, ('{group}', {port}))"
        )
        free.exec(["python3", "-c", code])
    for name in ("metadata.google.internal", "printer.local", "wpad", "localhost", "254.169.254.169.in-addr.arpa"):
        for kind in (1, 12, 28):
            assert ask(free, (name, kind))[0][0] == NXDOMAIN
    assert world.names.queries() == []
    assert {packet.destination for packet in world.packets() if packet.protocol == "udp"} <= set(addresses.RESOLVERS)


def test_metadata_in_every_spelling(world, free):
    """What the C library makes an address of never gets there."""
    spellings = [
        "169.254.169.254",
        "0xa9fea9fe",
        "2852039166",
        "0251.0376.0251.0376",
        "169.254.43518",
        "[::ffff:a9fe:a9fe]",
    ]
    world.names.set("169.254.169.254.nip.example", [addresses.METADATA])
    for host in (*spellings, "169.254.169.254.nip.example", "metadata.google.internal", "instance-data"):
        code = f"import urllib.request as u; print(u.urlopen('http://{host}/', timeout=4).read())"
        result = free.exec(["python3", "-c", code])
        assert result.exit_code != 0, host
    assert addresses.METADATA not in {packet.destination for packet in world.packets()}


def test_a_resolver_that_fails(world, free):
    """Quickly told, over TCP where UDP is cut, and healed as soon as it answers."""
    try:
        world.names.mood("truncate")
        world.names.set("cut.allowed.example", [addresses.WEB])
        assert addresses_of(free, "cut.allowed.example") == [addresses.WEB]
        world.names.mood("servfail")
        assert ask(free, ("fails.allowed.example", 1))[0][0] == SERVFAIL
        world.names.mood("silent")
        rcode, _, words = ask(free, ("silent.allowed.example", 1))[0]
        assert (rcode, words.startswith("cpuos: no resolver answered")) == (SERVFAIL, True)
    finally:
        world.names.mood()
    world.names.set("silent.allowed.example", [addresses.WEB])
    assert addresses_of(free, "silent.allowed.example") == [addresses.WEB]


def test_a_flood_hurts_only_its_sandbox(world, free, listed):
    flood = (
        "import socket, time\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('10.0.0.1', 53))\n"
        "data = bytes.fromhex('004d01000001000000000000') + b'\\3web\\7allowed\\7example\\0\\0\\1\\0\\1'\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end:\n"
        "    for _ in range(20):\n"
        "        s.send(data)\n"
        "    time.sleep(0.01)\n"
    )
    job = free.spawn(["python3", "-c", flood])
    try:
        for _ in range(3):
            rows = ask(listed, *(("web.allowed.example", 1) for _ in range(60)), limit_s=4)
            found = [(row[0], *row[1]) for row in rows]
            assert found.count((NOERROR, addresses.WEB)) >= 57, found  # a datagram may be lost on a busy machine
    finally:
        job.kill()


def test_the_forwarder_is_dead(world, listed, sealed_instance):
    """Stopped: no answer. Dead: none either, until there is another, which knows the policy."""
    worker = sealed_instance.helper("dns")
    os.kill(worker, signal.SIGSTOP)
    assert ask(listed, ("web.allowed.example", 1), limit_s=3)[0][0] == "TimeoutError"
    assert not connects(listed, addresses.OTHER_WEB)
    until(lambda: sealed_instance.helper("dns") not in (0, worker), limit_s=90)
    until(lambda: addresses_of(listed, "web.allowed.example") == [addresses.WEB])
    assert ask(listed, ("open.example", 1))[0][0] == REFUSED  # with its policy, not with none
