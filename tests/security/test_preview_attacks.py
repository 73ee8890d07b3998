"""What visitors, pages and sandboxes try on previews, on real sandboxes where the machine has them."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cpuos import Client, Sandbox
from cpuos.testing.instance import Instance
from cpuos.testing.memory import resident_mib
from cpuos.types.port import PortAccess

SERVER = Path(__file__).parents[1] / "preview_server.py"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"


@pytest.fixture(scope="module")
def boxes(client: Client) -> Iterator[tuple[Sandbox, Sandbox]]:
    """Two sandboxes with the same server: one's visitor must not reach the other's."""
    with (
        Sandbox.create(client=client, memory="512MiB", disk="128MiB", timeout="20m") as mine,
        Sandbox.create(client=client, memory="512MiB", disk="128MiB", timeout="20m") as other,
    ):
        for number, box in enumerate((mine, other)):  # on a fake runtime both share this machine's ports
            box.files.write("/workspace/server.py", SERVER.read_bytes())
            start(box, port_of(number))
        yield mine, other


def port_of(number: int) -> int:
    return 38310 + number


def start(box: Sandbox, port: int) -> None:
    folder = box.exec("pwd").stdout.strip()
    job = box.spawn(["python3", f"{folder}/server.py", "127.0.0.1", str(port)])
    deadline = time.monotonic() + 30
    while not job.output():
        assert not job.refresh().status.ended
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Line:
    """A visitor that sends any bytes."""

    def __init__(self, instance: Instance, *, timeout_s: float = 20) -> None:
        self.socket = socket.create_connection(("127.0.0.1", instance.settings.preview_port), timeout=timeout_s)

    def ask(self, data: bytes) -> bytes:
        """What comes back until the connection's end."""
        with self.socket:
            try:
                self.socket.sendall(data)
                self.socket.shutdown(socket.SHUT_WR) if b"\r\n\r\n" not in data else None
            except OSError:
                pass
            return self.rest()

    def rest(self) -> bytes:
        got = b""
        try:
            while piece := self.socket.recv(65536):
                got += piece
        except (TimeoutError, ConnectionResetError):
            pass
        return got


def request(
    access: PortAccess, *lines: bytes, target: bytes = b"/", method: bytes = b"GET", token: bool = True
) -> bytes:
    host = urlsplit(access.url).netloc.encode()
    head = [method + b" " + target + b" HTTP/1.1", b"Host: " + host, b"Connection: close", *lines]
    if token and access.token:
        head.append(b"X-Cpuos-Preview-Token: " + access.token.encode())
    return b"\r\n".join([*head, b"", b""])


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


@pytest.fixture
def mine(boxes: tuple[Sandbox, Sandbox]) -> PortAccess:
    return boxes[0].ports.publish(port_of(0))


@pytest.fixture
def other(boxes: tuple[Sandbox, Sandbox]) -> PortAccess:
    return boxes[1].ports.publish(port_of(1))


def test_the_header_log_of_a_server_shows_nothing_of_ours(
    instance: Instance, boxes: tuple[Sandbox, Sandbox], mine: PortAccess
) -> None:
    token = (mine.token or "").encode()
    ticket = boxes[0]._client.call("POST", f"/v1/sandboxes/{boxes[0].id}/access").body
    exec_ticket = json.loads(ticket)["ticket"].encode()
    key = instance.api_key.encode()
    given = [
        b"Authorization: Bearer " + key,
        b"X-Api-Key: " + key,
        b"Cookie: a=1; __Host-cpuos-preview=" + token + b"; __Host-cpuos-session=2",
        b"Referer: http://" + urlsplit(mine.url).netloc.encode() + b"/?cpuos_token=" + token,
        b"X-Forwarded-For: 10.0.0.1",
        b"X-Forwarded-Proto: https",
        b"X_Forwarded_Host: api.internal",
        b"Forwarded: for=10.0.0.1",
        b"X-Real-IP: 10.0.0.1",
        b"Proxy-Authorization: Bearer " + exec_ticket,
    ]
    answer = Line(instance).ask(request(mine, *given, target=b"/?x=1&cpuos_token=" + token))
    assert statuses(answer) == [200]
    log = answer.partition(b"\r\n\r\n")[2]
    for secret in (token, exec_ticket, key, b"cpk_", b"cpuos", b"10.0.0.1", b"api.internal"):
        assert secret.lower() not in log.lower(), secret
    assert b"GET /?x=1 HTTP/1.1\r\n" in log
    assert log.lower().count(b"x-forwarded-for:") == 1
    assert b"x-forwarded-proto: http\r\n" in log.lower()
    answer = Line(instance).ask(request(mine, b"Authorization: Bearer " + exec_ticket))
    assert exec_ticket not in answer


def test_a_token_opens_one_port_of_one_sandbox(
    instance: Instance, boxes: tuple[Sandbox, Sandbox], mine: PortAccess, other: PortAccess
) -> None:
    token = (mine.token or "").encode()
    second = boxes[0].ports.publish(port_of(0) + 100)
    for access in (other, second):
        for shown in (
            b"X-Cpuos-Preview-Token: " + token,
            b"Cookie: __Host-cpuos-preview=" + token,
        ):
            assert statuses(Line(instance).ask(request(access, shown, token=False))) == [401]
        assert statuses(Line(instance).ask(request(access, target=b"/?cpuos_token=" + token, token=False))) == [401]
    boxes[0].ports.close(second.port)


def test_a_token_is_no_key_and_no_ticket(instance: Instance, boxes: tuple[Sandbox, Sandbox], mine: PortAccess) -> None:
    bearer = f"Authorization: Bearer {mine.token}\r\n"
    api, data = instance.settings.api_port, instance.settings.gateway_port
    commands = f"/v1/sandboxes/{boxes[0].id}/commands"
    tries = [(api, "/v1/sandboxes", 401), (data, commands, 403), (data, f"/v1/links/{mine.token}", 403)]
    for port, path, status in tries:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
            line.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{bearer}\r\n".encode())
            assert line.recv(65536).startswith(b"HTTP/1.1 %d" % status)


def test_a_replayed_token_is_void_when_the_port_was_closed(
    instance: Instance, boxes: tuple[Sandbox, Sandbox], mine: PortAccess
) -> None:
    assert statuses(Line(instance).ask(request(mine))) == [200]
    boxes[0].ports.close(port_of(0))
    assert statuses(Line(instance).ask(request(mine))) == [401]
    fresh = boxes[0].ports.publish(port_of(0))
    assert statuses(Line(instance).ask(request(mine))) == [401]
    assert statuses(Line(instance).ask(request(fresh))) == [200]


def test_the_agents_port_and_what_is_no_port(
    instance: Instance, boxes: tuple[Sandbox, Sandbox], mine: PortAccess
) -> None:
    place = urlsplit(mine.url).netloc.partition("-")[2]
    for port, expected in ((b"1", [403]), (b"0", [400]), (b"65536", [400]), (b"01", [400]), (b"-1", [400])):
        head = b"GET / HTTP/1.1\r\nHost: " + port + b"-" + place.encode() + b"\r\nConnection: close\r\n\r\n"
        assert statuses(Line(instance).ask(head)) == expected
    for number in (0, 1, 65536, -1):
        with pytest.raises(Exception, match="cannot publish the port"):
            boxes[0].ports.url(number)


HOSTS = [
    b"Host: localhost",
    b"Host: 127.0.0.1",
    b"Host: preview.localhost",
    b"Host: evil.example",
    b"Host: OWN\r\nHost: OWN",
    b"Host: OWN\r\nHost: OTHER",
    b"Host: OTHER, OWN",
    b"Host: OWN.",
    b"Host: OWN@evil.example",
    b"Host: evil.example#OWN",
    b"Host:",
    b"X: y",
    b"Host : OWN",
    b" Host: OWN",
    b"Host: OWN\r\n .evil.example",
    b"Host:\tOWN\x0b",
]


@pytest.mark.parametrize("line", HOSTS)
def test_tricks_with_the_host(instance: Instance, mine: PortAccess, other: PortAccess, line: bytes) -> None:
    own, others = (urlsplit(access.url).netloc.encode() for access in (mine, other))
    token = b"X-Forwarded-Host: " + own + b"\r\nCookie: __Host-cpuos-preview=" + (mine.token or "").encode()
    line = line.replace(b"OWN", own).replace(b"OTHER", others)
    answer = Line(instance).ask(b"GET / HTTP/1.1\r\n" + line + b"\r\nConnection: close\r\n" + token + b"\r\n\r\n")
    assert statuses(answer) == [400]
    assert b"preview_server" not in answer


@pytest.mark.parametrize("target", [b"http://OWN/", b"http://OTHER/", b"//evil.example", b"*", b"OWN:443", b"", b"x"])
def test_tricks_with_the_target(instance: Instance, mine: PortAccess, other: PortAccess, target: bytes) -> None:
    own, others = (urlsplit(access.url).netloc.encode() for access in (mine, other))
    target = target.replace(b"OWN", own).replace(b"OTHER", others)
    answer = Line(instance).ask(request(mine, target=target))
    if target == b"//evil.example":
        assert b"GET //evil.example HTTP/1.1" in answer  # a path as any other, of the same server
    elif target == b"*":
        assert statuses(answer) == [200]
    else:
        assert statuses(answer) in ([400], [])
    connect = Line(instance).ask(request(mine, target=own, method=b"CONNECT"))
    assert statuses(connect) == [400]


# Each would make two proxies in a row disagree where a request ends. What arrives inside is one request, or none.
SMUGGLING = [
    b"POST / HTTP/1.1\r\nHEAD\r\nContent-Length: 44\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n1\r\nZ\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nContent-Length: 0\r\nContent-Length: 40\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nContent-Length: 0, 40\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nContent-Length: +0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nContent-Length: 0x0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nContent-Length: -1\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding: chunked\r\n\r\n0x0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding: chunked\r\n\r\n1\rZ\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\r\nHEAD\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\nSECOND",
    b"POST / HTTP/1.0\r\nHEAD\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nSECOND",
    b"POST / HTTP/1.1\rHEAD\r\n\r\nSECOND",
    b"GET / HTTP/1.1\r\nHEAD\r\nX: a\rGET /smuggled HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHEAD\r\nX: a\x00b\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHEAD\r\n\r\n",
    b"GET / HTTP/1.1 HTTP/1.1\r\nHEAD\r\n\r\n",
    b"GET / HTTP/2.0\r\nHEAD\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.mark.parametrize("attack", SMUGGLING)
def test_no_second_request_is_smuggled_in(instance: Instance, mine: PortAccess, attack: bytes) -> None:
    host = urlsplit(mine.url).netloc.encode()
    head = b"Host: " + host + b"\r\nX-Cpuos-Preview-Token: " + (mine.token or "").encode()
    second = b"GET /smuggled HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"  # without the token
    # One that waits for more is silent: what it would say of the second comes with the first or not at all.
    answer = Line(instance, timeout_s=4).ask(attack.replace(b"HEAD", head).replace(b"SECOND", second))
    assert b"GET /smuggled" not in answer.partition(b"\r\n\r\n")[2]
    assert set(statuses(answer)) <= {400, 401, 501}


def test_what_follows_a_whole_body_is_a_request_of_its_own(instance: Instance, mine: PortAccess) -> None:
    """And is let in or refused by its own headers."""
    host = urlsplit(mine.url).netloc.encode()
    token = b"X-Cpuos-Preview-Token: " + (mine.token or "").encode()
    first = b"POST / HTTP/1.1\r\nHost: " + host + b"\r\n" + token + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    second = b"GET /second HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
    assert statuses(Line(instance).ask(first + second)) == [200, 401]


def test_the_tunnel_leads_to_the_one_port_only(instance: Instance, mine: PortAccess) -> None:
    """After an upgrade the bytes are the server's: what looks like a call of the agent reaches nobody else."""
    line = Line(instance)
    line.socket.sendall(request(mine, WEBSOCKET.rstrip()).replace(b"Connection: close\r\n", b""))
    got = b""
    while b"\r\n\r\n" not in got:
        got += line.socket.recv(65536)
    assert b" 101 " in got
    line.socket.sendall(
        b"\x81\x85\0\0\0\0hello" + b"POST /v1/commands?id=aaaaaaaaaaaaaaaa HTTP/1.1\r\nHost: agent\r\n\r\n"
    )
    while b"hello" not in got:
        got += line.socket.recv(65536)
    line.socket.settimeout(2)
    rest = got + line.rest()
    assert b"hello" in rest
    assert b"identity_required" not in rest
    line.socket.close()


@pytest.mark.parametrize("protocol", [b"tunnel", b"cpuos-frames/1", b"h2c"])
def test_no_other_upgrade_passes(instance: Instance, mine: PortAccess, protocol: bytes) -> None:
    lines = [b"Connection: Upgrade", b"Upgrade: " + protocol]
    answer = Line(instance).ask(request(mine, *lines))
    assert statuses(answer) == [200]
    assert b"upgrade" not in answer.partition(b"\r\n\r\n")[2].lower()


def test_a_page_speaks_for_its_own_host_only(instance: Instance, mine: PortAccess) -> None:
    answer = Line(instance).ask(request(mine, target=b"/cookies")).lower()
    assert statuses(answer.replace(b"http", b"HTTP")) == [200]
    assert b"set-cookie: a=1\r\n" in answer
    for beyond in (b"domain=", b"__host-cpuos", b"strict-transport"):
        assert beyond not in answer


def test_another_origin_cannot_use_a_visitors_cookie(instance: Instance, mine: PortAccess, other: PortAccess) -> None:
    cookie = b"Cookie: __Host-cpuos-preview=" + (mine.token or "").encode()
    sibling = b"Origin: http://" + urlsplit(other.url).netloc.encode()
    own = b"Origin: http://" + urlsplit(mine.url).netloc.encode()
    post = b"Content-Length: 0"
    assert statuses(Line(instance).ask(request(mine, cookie, post, sibling, method=b"POST", token=False))) == [403]
    assert statuses(Line(instance).ask(request(mine, cookie, post, own, method=b"POST", token=False))) == [200]
    for origin, status in ((sibling, 403), (b"Origin: null", 403), (b"X: y", 403)):
        head = request(mine, cookie, WEBSOCKET.rstrip(), origin, token=False).replace(b"Connection: close\r\n", b"")
        line = Line(instance)
        with line.socket:
            line.socket.sendall(head)
            assert line.socket.recv(65536).startswith(b"HTTP/1.1 %d" % status)


def test_heads_without_end_cost_nothing(instance: Instance, mine: PortAccess) -> None:
    before = resident_mib(instance.pids()["gateway"])
    endless = Line(instance)
    with endless.socket, pytest.raises(OSError):
        _send_endlessly(endless.socket)
    half_open = [Line(instance) for _ in range(200)]
    try:
        for attacker in half_open:
            attacker.socket.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert statuses(Line(instance).ask(request(mine))) == [200]
    finally:
        for attacker in half_open:
            attacker.socket.close()
    assert resident_mib(instance.pids()["gateway"]) - before < 16


def _send_endlessly(line: socket.socket) -> None:
    line.sendall(b"GET / HTTP/1.1\r\nX: ")
    for _ in range(64):
        line.sendall(b"a" * (1 << 20))


def test_many_tiny_chunks_do_not_hold_up_others(instance: Instance, mine: PortAccess) -> None:
    """A body of one-byte chunks costs its parser much: others are served in between."""
    head = request(mine, b"Transfer-Encoding: chunked", method=b"POST").replace(b"Connection: close\r\n", b"")
    attackers = [Line(instance) for _ in range(4)]
    try:
        for attacker in attackers:
            attacker.socket.sendall(head)
            attacker.socket.setblocking(False)
            try:
                while attacker.socket.send(b"1\r\na\r\n" * 20_000):
                    pass
            except BlockingIOError:
                pass
        began = time.monotonic()
        assert statuses(Line(instance).ask(request(mine))) == [200]
        assert time.monotonic() - began < 20
    finally:
        for attacker in attackers:
            attacker.socket.close()
