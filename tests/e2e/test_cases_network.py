"""Case C26, egress by name: every way out but the allowed name is refused, at once, and on record with its rule."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses
from cpuos.testing.waiting import wait_until
from cpuos.types.network import Connection, Verdict
from refusals import told_refusals

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

ALLOWED, EVIL, MDNS = "allowed.test", "x.evil.test", "224.0.0.251"

# Each try is [how, place, port]; told: what came, and after how long.
TRY = r"""
import json, socket, ssl, struct, sys, time
QUERY = bytes.fromhex("004d01000001000000000000") + b"\1x\4evil\4test\0\0\1\0\1"
def name(place, port):
    return socket.getaddrinfo(place, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
def tcp(place, port):
    made = socket.create_connection((place, port), 20)
    made.close()
    return "connected"
def tcp6(place, port):
    made = socket.socket(socket.AF_INET6)
    made.settimeout(20)
    made.connect((place, port))
    return "connected"
def udp(place, port):
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(2 if place.startswith("224.") else 20)
    made.connect((place, port))
    made.send(QUERY)
    return made.recv(2000).hex()
def ping(place, port):
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    made.settimeout(2)
    made.connect((place, 0))
    made.send(struct.pack(">BBHHH", 8, 0, 0, 1, 1))
    return made.recv(2000).hex()
def tls(place, port, server_name):
    context = ssl._create_unverified_context()
    with socket.create_connection((place, port), 20) as plain, context.wrap_socket(plain, server_hostname=server_name) as made:
        made.send(b"GET / HTTP/1.1\r\nHost: " + server_name.encode() + b"\r\n\r\n")
        return made.recv(100)[:15].decode()
for how, *given in json.loads(sys.argv[1]):
    began = time.monotonic()
    try:
        came = globals()[how](*given)
    except (OSError, ValueError) as error:
        came = type(error).__name__
    print(json.dumps([came, time.monotonic() - began]))
"""  # noqa: E501


def attempt(sandbox: Sandbox, *tries: tuple) -> list[str]:
    result = sandbox.exec(["python3", "-c", TRY, json.dumps(tries)])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == len(tries), (result.stdout, result.stderr)
    # Nothing may answer a multicast packet, so a program that waits for one waits.
    slow = [(one, row) for one, row in zip(tries, rows, strict=True) if row[1] > 9 and one[1] != MDNS]
    assert not slow, slow
    return [came for came, _ in rows]


@pytest.fixture(scope="module")
def world(sealed: SealedWorld) -> SealedWorld:
    sealed.names.set(ALLOWED, [addresses.WEB], ttl=1)
    sealed.names.set(EVIL, [addresses.OTHER_WEB])
    return sealed


@pytest.fixture
def sandbox(world: SealedWorld, sealed_instance: SealedInstance) -> Iterator[Sandbox]:
    network = Network(allow=[ALLOWED])
    with Sandbox.create(client=sealed_instance.client(), template="python", network=network) as sandbox:
        yield sandbox


def recorded(sandbox: Sandbox, **wanted: object) -> list[Connection]:
    return [
        one for one in sandbox.audit.connections() if all(getattr(one, name) == value for name, value in wanted.items())
    ]


def test_c26_all_other_ways_are_refused_and_on_record(world: SealedWorld, sandbox: Sandbox) -> None:
    world.clear()
    not_listed = "not in the sandbox allow list"
    refused_tcp = {
        ("8.8.8.8", 53): not_listed,
        ("8.8.8.8", 853): not_listed,
        ("1.1.1.1", 443): not_listed,
        (addresses.WEB, 25): "always blocked: SMTP",
        (addresses.METADATA, 80): "always blocked: link-local",
        ("10.20.30.40", 80): "always blocked: private",
        ("100.100.1.1", 80): "always blocked: shared",
        (addresses.AZURE, 80): "always blocked: cloud platform",
        (addresses.HOST, 22): "always blocked: the host's own address",
    }
    refused_udp = {("8.8.8.8", 53): not_listed, (MDNS, 5353): "always blocked: multicast"}
    came = attempt(
        sandbox,
        ("name", EVIL, 80),
        *(("tcp", *place) for place in refused_tcp),
        *(("udp", *place) for place in refused_udp),
    )
    assert came == ["gaierror"] + ["ConnectionRefusedError"] * (len(refused_tcp) + 1) + ["TimeoutError"]
    # Spellings: a decimal address, IPv4 in IPv6, and IPv6 itself, which the sandbox does not have. And ping.
    odd = attempt(
        sandbox,
        ("tcp", "2852039166", 80),
        ("tcp6", "::ffff:169.254.169.254", 80),
        ("tcp6", "2606:4700:4700::1111", 443),
        ("ping", "8.8.8.8", 0),
    )
    assert not {"connected"} & set(odd)
    assert all(came.endswith("Error") for came in odd), odd

    (name,) = wait_until(lambda: recorded(sandbox, name=EVIL))
    assert (name.kind, name.verdict, name.rule) == ("dns", Verdict.REFUSED, not_listed)
    for kind, places in (("tcp", refused_tcp), ("udp", refused_udp)):
        for (address, port), rule in places.items():
            found = wait_until(lambda: recorded(sandbox, kind=kind, address=address, port=port))  # noqa: B023
            assert [(one.verdict, one.rule) for one in found][:1] == [(Verdict.REFUSED, rule)], (
                kind,
                address,
                port,
                found,
            )
    assert world.names.queries() == []
    assert {packet.destination for packet in world.packets()} <= {addresses.HOST}


def test_c26_the_allowed_name_works_also_after_it_moved(world: SealedWorld, sandbox: Sandbox) -> None:
    world.clear()
    greeting = ["HTTP/1.1 200 OK", "HTTP/1.0 200 OK"]
    world.names.set(ALLOWED, [addresses.WEB], ttl=1)
    assert attempt(sandbox, ("tls", ALLOWED, 443, ALLOWED))[0] in greeting
    world.names.set(ALLOWED, ["93.184.50.50"], ttl=1)
    deadline = time.monotonic() + 60
    while attempt(sandbox, ("name", ALLOWED, 443)) != ["93.184.50.50"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert attempt(sandbox, ("tls", ALLOWED, 443, ALLOWED))[0] in greeting
    # The same address under another name, and no name at all, do not pass.
    others = attempt(sandbox, ("tls", "93.184.50.50", 443, EVIL), ("tls", "93.184.50.50", 443, "93.184.50.50"))
    assert set(others) <= {"ConnectionResetError", "SSLEOFError", "SSLZeroReturnError", "ConnectionRefusedError"}, (
        others
    )
    seen = {connection.sni for connection in world.connections() if connection.protocol == "tls"}
    assert seen == {ALLOWED}
    assert {query["name"].rstrip(".").lower() for query in world.names.queries()} == {ALLOWED}

    def allowed() -> list[Connection]:
        return recorded(sandbox, verdict=Verdict.ALLOWED, name=ALLOWED, port=443)

    wait_until(lambda: {one.address for one in allowed()} == {addresses.WEB, "93.184.50.50"})
    assert {one.rule for one in allowed()} == {f"sandbox allow {ALLOWED}"}
    wait_until(lambda: [one for one in recorded(sandbox, verdict=Verdict.REFUSED, port=443) if one.name == EVIL])


def test_a_connection_is_recorded_with_its_bytes(world: SealedWorld, sandbox: Sandbox) -> None:
    assert attempt(sandbox, ("tls", ALLOWED, 443, ALLOWED))[0].endswith("200 OK")
    deadline = time.monotonic() + 60
    while not (ended := [one for one in recorded(sandbox, name=ALLOWED, port=443) if one.ended_at is not None]):
        assert time.monotonic() < deadline, sandbox.audit.connections()
        time.sleep(0.5)
    assert (ended[0].bytes_sent or 0) > 300
    assert (ended[0].bytes_received or 0) > 300


def test_a_command_is_told_what_it_was_refused(world: SealedWorld, sandbox: Sandbox) -> None:
    assert told_refusals(lambda: sandbox.exec("sleep 0.1; exit 3")).refused_connections == []
    ask = "curl -sS --max-time 10 http://169.254.169.254/latest/ || curl -sS https://x.evil.test/"
    result = told_refusals(lambda: sandbox.exec(ask))
    refused = {(one.name or one.address, one.rule) for one in result.refused_connections or []}
    assert ("169.254.169.254", "always blocked: link-local") in refused
    assert (EVIL, "not in the sandbox allow list") in refused
    assert all("refused" in one.reason for one in result.refused_connections or [])
