"""Requests on a plain connection: whose they are, and what is passed on."""

from __future__ import annotations

import contextlib

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuos.node.network.peek.http_requests import MAX_HEAD_BYTES, Finals, RequestHead, RequestStream


def read(data: bytes, *, size: int | None = None, port: int = 80) -> tuple[list[str], bytes]:
    """Hosts, and what is passed on."""
    stream, hosts, passed = RequestStream(port), [], b""
    step = size or max(1, len(data))
    for start in range(0, len(data), step):
        for found in stream.feed(data[start : start + step]):
            if isinstance(found, RequestHead):
                hosts.append(found.host)
                passed += found.wire
            else:
                passed += found
    return hosts, passed


def request(*lines: str, first: str = "GET / HTTP/1.1") -> bytes:
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1")


PLAIN = request("Host: a.example", "X-Some:  thing  ")


@pytest.mark.parametrize("size", [None, 1, 2, 7])
def test_one_request(size: int | None) -> None:
    assert read(PLAIN, size=size) == (["a.example"], request("Host: a.example", "X-Some: thing"))


@pytest.mark.parametrize("size", [None, 1, 3])
def test_every_request_of_a_connection_is_seen(size: int | None) -> None:
    data = (
        request("Host: a.example", "Content-Length: 6", first="POST /x HTTP/1.1")
        + b"GET /\r"
        + request("Host: b.example", "Transfer-Encoding: chunked", first="PUT /y HTTP/1.1")
        + b"3;name=value\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
        + b"\r\n"
        + request("Host: C.example:80", first="HEAD * HTTP/1.1".replace("*", "/z"))
    )
    hosts, passed = read(data, size=size)
    assert hosts == ["a.example", "b.example", "c.example"]
    assert b"name=value" not in passed
    assert b"Trailer: x" not in passed
    assert b"GET /\r" in passed


def test_what_is_passed_on_says_the_same_to_another_reader() -> None:
    data = request("Host: b.example", "Transfer-Encoding: chunked", first="PUT /y HTTP/1.1")
    data += b"3;a=b\r\nabc\r\n00A\r\n0123456789\r\n0\r\nX: y\r\n\r\n"
    _, passed = read(data, size=4)
    server = h11.Connection(h11.SERVER)
    server.receive_data(passed)
    head = server.next_event()
    assert isinstance(head, h11.Request)
    body = b""
    while isinstance(event := server.next_event(), h11.Data):
        body += bytes(event.data)
    assert body == b"abc0123456789"
    assert isinstance(event, h11.EndOfMessage)


REFUSED = {
    "no Host": request("X: y"),
    "no Host, HTTP/1.0": request(first="GET / HTTP/1.0"),
    "two Hosts": request("Host: a.example", "Host: a.example"),
    "two Hosts, one folded": request("Host: a.example", " b.example"),
    "folded": request("X: a", "\tb", "Host: a.example"),
    "space before the colon": request("Host : a.example"),
    "space in a name": request("X Y: a", "Host: a.example"),
    "no colon": request("Host: a.example", "nothing"),
    "empty Host": request("Host:"),
    "list of Hosts": request("Host: a.example, b.example"),
    "user in Host": request("Host: a.example@b.example"),
    "path in Host": request("Host: a.example/b"),
    "another port": request("Host: a.example:8080"),
    "port that is none": request("Host: a.example:http"),
    "IPv6": request("Host: [::1]"),
    "odd address": request("Host: 127.1"),
    "number": request("Host: 2130706433"),
    "non-ASCII Host": request("Host: b\xfccher.example"),
    "NUL in Host": request("Host: a.example\0.b.example"),
    "absolute form of another host": request("Host: a.example", first="GET http://b.example/ HTTP/1.1"),
    "absolute form without Host": request(first="GET http://b.example/ HTTP/1.1"),
    "absolute form with user": request("Host: a.example", first="GET http://a.example@b.example/ HTTP/1.1"),
    "absolute form of https": request("Host: a.example", first="GET https://a.example/ HTTP/1.1"),
    "tunnel": request("Host: a.example:80", first="CONNECT a.example:80 HTTP/1.1"),
    "no path": request("Host: a.example", first="GET a.example HTTP/1.1"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/1.2": request("Host: a.example", first="GET / HTTP/1.2"),
    "lower case version": request("Host: a.example", first="GET / http/1.1"),
    "two spaces": request("Host: a.example", first="GET  / HTTP/1.1"),
    "tab": request("Host: a.example", first="GET\t/ HTTP/1.1"),
    "bare line feeds": b"GET / HTTP/1.1\nHost: a.example\n\n",
    "bare line feed within": b"GET / HTTP/1.1\r\nX: y\nHost: b.example\r\nHost: a.example\r\n\r\n",
    "bare carriage return": b"GET / HTTP/1.1\r\nX: y\rHost: b.example\r\nHost: a.example\r\n\r\n",
    "TLS": b"\x16\x03\x01\x00\x05hello",
    "SSH": b"SSH-2.0-x\r\n",
    "two lengths": request("Host: a.example", "Content-Length: 1", "Content-Length: 1"),
    "length and coding": request("Host: a.example", "Content-Length: 1", "Transfer-Encoding: chunked"),
    "list of lengths": request("Host: a.example", "Content-Length: 1, 1"),
    "signed length": request("Host: a.example", "Content-Length: +1"),
    "unknown coding": request("Host: a.example", "Transfer-Encoding: gzip, chunked"),
    "identity": request("Host: a.example", "Transfer-Encoding: identity"),
    "chunks in HTTP/1.0": request("Host: a.example", "Transfer-Encoding: chunked", first="PUT / HTTP/1.0"),
    "hidden coding": request("Host: a.example", "Transfer-Encoding: \x0bchunked"),
    "Host of one hop": request("Host: a.example", "Connection: close, Host"),
    "many headers": request("Host: a.example", *["X: y"] * 300),
    "wrong chunk": request("Host: a.example", "Transfer-Encoding: chunked") + b"0x3\r\nabc\r\n0\r\n\r\n",
    "no end of a chunk": request("Host: a.example", "Transfer-Encoding: chunked") + b"3\r\nabcd\r\n0\r\n\r\n",
    "bare end of a chunk line": request("Host: a.example", "Transfer-Encoding: chunked") + b"3\nabc\r\n0\r\n\r\n",
    "line feed in a chunk's words": request("Host: a.example", "Transfer-Encoding: chunked") + b"3;\nx\r\nabc\r\n",
    "trailer that is none": request("Host: a.example", "Transfer-Encoding: chunked") + b"0\r\n x\r\n\r\n",
    "empty lines": b"\r\n" * 20,
}


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("case", REFUSED)
def test_what_could_mean_two_things_is_refused(case: str, size: int | None) -> None:
    with pytest.raises(ValueError, match=r"HTTP|host|Host"):
        read(REFUSED[case], size=size)


@pytest.mark.parametrize(
    ("data", "host"),
    [
        (request("host: A.Example."), "a.example"),
        (request("HOST:a.example:80"), "a.example"),
        (request("Host: a.example", first="GET http://A.example:80/x?y HTTP/1.1"), "a.example"),
        (request("Host: a.example", first="GET HTTP://a.example HTTP/1.1"), "a.example"),
        (request("Host: a.example", first="OPTIONS * HTTP/1.1"), "a.example"),
        (request("Host: a.example", first="GET / HTTP/1.0"), "a.example"),
        (request("Host: a.example", "X: \xe9"), "a.example"),
        (request("Host: 93.184.215.14"), "93.184.215.14"),
    ],
)
def test_forms_of_host(data: bytes, host: str) -> None:
    assert read(data)[0] == [host]


def test_an_address_as_host_is_known_as_one() -> None:
    [head] = list(RequestStream(8080).feed(request("Host: 93.184.215.14:8080")))
    assert isinstance(head, RequestHead)
    assert str(head.address) == "93.184.215.14"


def test_endless_heads_are_refused() -> None:
    stream = RequestStream(80)
    assert list(stream.feed(b"GET / HTTP/1.1\r\n")) == []
    for _ in range(MAX_HEAD_BYTES // 1000):
        assert list(stream.feed(b"X: " + b"y" * 995 + b"\r\n")) == []
    with pytest.raises(ValueError, match="too long"):
        list(stream.feed(b"X: " + b"y" * 995 + b"\r\n"))


def test_many_spaces_are_read_in_no_time() -> None:
    with pytest.raises(ValueError, match="header"):
        read(request("X:" + " " * 60000 + "\0", "Host: a.example"))


def test_first_request_may_ask_for_a_websocket() -> None:
    asks = request("Host: a.example", "Connection: keep-alive, Upgrade", "Upgrade: WebSocket")
    stream = RequestStream(80)
    [head] = list(stream.feed(asks))
    assert isinstance(head, RequestHead)
    assert head.asks_for_websocket
    assert b"Upgrade: WebSocket" in head.wire
    assert b"Connection: keep-alive, Upgrade" in head.wire
    [later] = list(stream.feed(asks))
    assert isinstance(later, RequestHead)
    assert not later.asks_for_websocket
    assert b"pgrade" not in later.wire
    assert b"Connection: keep-alive" in later.wire


@pytest.mark.parametrize("value", ["h2c", "TLS/1.0", "websocket, h2c", "spdy/3.1"])
def test_other_upgrades_are_not_asked_for(value: str) -> None:
    data = request(
        "Host: a.example", "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {value}", "HTTP2-Settings: AAMA"
    )
    [head] = list(RequestStream(80).feed(data))
    assert isinstance(head, RequestHead)
    assert not head.asks_for_websocket
    assert head.wire == request("Host: a.example")


def test_status_of_the_first_final_answer() -> None:
    data = b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\nHTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
    for size in (1, 5, len(data)):
        finals = Finals()
        statuses = [finals.feed(data[at : at + size]) for at in range(0, len(data), size)]
        assert [status for status in statuses if status] == [101]
    with pytest.raises(ValueError, match="answer"):
        Finals().feed(b"\x16\3\3\0\0\r\n\r\n")


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_or_wait(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        hosts, _ = read(data)
        assert all(host in data.decode("latin-1").lower() for host in hosts)


_lines = """
Host: a.example
Host: b.example
Host:a.example:80
Content-Length: 3
Transfer-Encoding: chunked
Connection: close
X: y
 folded
abc
3
0
GET / HTTP/1.1
POST http://b.example/ HTTP/1.1
"""
_word = st.sampled_from(_lines.splitlines())
_end = st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r"])


@settings(max_examples=500)
@given(st.lists(st.tuples(_word, _end), max_size=20))
def test_another_strict_reader_sees_the_same_hosts(lines: list[tuple[str, str]]) -> None:
    data = b"GET / HTTP/1.1\r\n" + "".join(word + end for word, end in lines).encode()
    stream, hosts, passed = RequestStream(80), [], b""
    try:
        for found in stream.feed(data):
            passed += found.wire if isinstance(found, RequestHead) else found
            hosts += [found.host] if isinstance(found, RequestHead) else []
    except ValueError:
        pass
    assert _hosts_by_h11(passed) == hosts


def _hosts_by_h11(data: bytes) -> list[str]:
    server = h11.Connection(h11.SERVER)
    if not data:
        return []
    server.receive_data(data)
    hosts: list[str] = []
    while True:
        event = server.next_event()
        if isinstance(event, h11.Request):
            hosts += [value.decode().removesuffix(":80") for name, value in event.headers if name == b"host"]
        elif isinstance(event, h11.EndOfMessage):
            server.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            server.send(h11.EndOfMessage())
            if server.our_state is not h11.DONE:
                # `Connection: close`: what follows is not read by a server.
                return hosts
            server.start_next_cycle()
        elif event in (h11.NEED_DATA, h11.PAUSED):
            return hosts
