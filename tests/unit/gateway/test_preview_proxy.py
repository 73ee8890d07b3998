"""What passes between a visitor and a server inside, byte for byte."""

from __future__ import annotations

import asyncio
import random
import ssl
from contextlib import suppress
from pathlib import Path

import h11
import pytest
from gateway_rig import SANDBOX
from preview_rig import Inside, PreviewRig, Visitor, answering, open_previews, serving

from cpuos.errors import SetupRequired
from cpuos.gateway.previews.serve import PreviewListener, serve_previews
from cpuos.gateway.previews.visits import PreviewTimes
from cpuos.settings import load_settings
from cpuos.setup.certificates import make_certificates
from cpuos.testing.waiting import until


async def test_a_request_and_its_answer_pass(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        answer = await previews.get(inside.port, "/a%20b?x=1&y", headers=previews.auth(inside.port))
        assert (answer.status, answer.body) == (200, b"ok")
        assert inside.heads[0].startswith(b"GET /a%20b?x=1&y HTTP/1.1\r\n")
        assert inside.header("host") == previews.host(inside.port)
        assert inside.header("x-forwarded-host") == previews.host(inside.port)
        assert inside.header("x-forwarded-proto") == "http"
        assert inside.header("x-forwarded-for") == "127.0.0.1"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_a_server_on_either_loopback_is_reached(previews: PreviewRig, address: str) -> None:
    async with serving(host=address) as inside:
        await previews.publish(inside.port, public=True)
        assert (await previews.get(inside.port)).body == b"ok"


async def test_connections_are_kept_on_both_sides(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for number in range(5):
            answer = await visitor.request(target=f"/{number}", host=previews.host(inside.port))
            assert answer.status == 200
        assert inside.connections == 1
        assert [head.split()[1] for head in inside.heads] == [b"/0", b"/1", b"/2", b"/3", b"/4"]


async def test_a_kept_connection_that_its_server_closed_is_replaced(previews: PreviewRig) -> None:
    async def close_after_answer(inside: Inside, head: bytes, reader, writer) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        return False  # without having said so

    async with serving(close_after_answer) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for _ in range(20):
            assert (await visitor.request(host=previews.host(inside.port))).body == b"ok"


async def test_a_request_that_met_the_end_of_a_kept_connection_is_sent_once_more(previews: PreviewRig) -> None:
    async def answer_once(inside: Inside, head: bytes, reader, writer) -> bool:
        length = int(inside.header("content-length") or 0)
        await reader.readexactly(length)
        answers = inside.connections > len(answered)
        if answers:
            answered.append(head)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        return answers

    answered: list[bytes] = []
    async with serving(answer_once) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for number in range(3):
            assert (await visitor.request(host=previews.host(inside.port))).status == 200
            assert (inside.connections, len(inside.heads)) == (number + 1, 2 * number + 1)
        # What changes something is not repeated: nobody knows whether it was done.
        answer = await visitor.request("POST", host=previews.host(inside.port), body=b"x")
        assert (answer.status, answer.one("x-cpuos-error")) == (502, "port_answer_invalid")
        assert inside.connections == 3


async def test_methods_and_bodies(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for method in ("POST", "PUT", "PATCH", "DELETE", "PROPFIND"):
            body = method.encode() * 1000
            answer = await visitor.request(method, host=previews.host(inside.port), body=body)
            assert answer.status == 200
            assert inside.bodies[-1] == body
            assert inside.heads[-1].startswith(method.encode() + b" / ")
        assert inside.header("transfer-encoding") is None


async def test_a_chunked_body_arrives_chunked_without_its_trailers(previews: PreviewRig) -> None:
    async def take_chunks(inside: Inside, head: bytes, reader, writer) -> bool:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        inside.bodies.append(body + await reader.readuntil(b"\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        return True

    async with serving(take_chunks) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        head = f"POST / HTTP/1.1\r\nHost: {previews.host(inside.port)}\r\nTransfer-Encoding: chunked\r\n"
        await visitor.send(head.encode() + b"Trailer: X-A\r\n\r\n3;ext=1\r\nabc\r\n4\r\ndefg\r\n0\r\nX-A: 1\r\n\r\n")
        assert (await visitor.answer("POST")).status == 204
        assert inside.bodies == [b"abcdefg\r\n"]
        assert inside.header("trailer") is None


async def test_head_has_the_headers_and_no_body(previews: PreviewRig) -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\nX-A: 1\r\n\r\n")) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for _ in range(2):
            answer = await visitor.request("HEAD", host=previews.host(inside.port))
            assert (answer.status, answer.one("content-length"), answer.one("x-a")) == (200, "12345", "1")
        assert inside.connections == 1


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-T: 1\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", b""),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", b"a"),
    ],
)
async def test_every_way_to_end_a_body(previews: PreviewRig, raw: bytes, body: bytes) -> None:
    async with serving(answering(raw, close=True)) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for _ in range(2):
            answer = await visitor.request(host=previews.host(inside.port))
            assert answer.body == body
            assert answer.interim == ([103] if b"103" in raw else [])
            assert answer.one("x-t") is None


async def test_an_old_visitor_gets_a_body_that_ends_with_the_connection(previews: PreviewRig) -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    async with serving(answering(raw)) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        await visitor.send(f"GET / HTTP/1.0\r\nHost: {previews.host(inside.port)}\r\n\r\n".encode())
        head, _, body = (await visitor.ended()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"chunked" not in head.lower()
        assert body == b"abc"


async def test_pipelined_requests_are_answered_in_order(previews: PreviewRig) -> None:
    async def echo_target(inside: Inside, head: bytes, reader, writer) -> bool:
        target = head.split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(target), target))
        return True

    async with serving(echo_target) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        one = f"GET /%d HTTP/1.1\r\nHost: {previews.host(inside.port)}\r\n\r\n"
        await visitor.send("".join(one % number for number in range(10)).encode())
        buffered = b""
        while buffered.count(b"HTTP/1.1 200") < 10 or not buffered.endswith(b"/9"):
            buffered += await asyncio.wait_for(visitor.reader.read(65536), 20)
        assert [part[-2:] for part in buffered.split(b"HTTP/1.1 ")[1:]] == [b"/%d" % number for number in range(10)]


async def test_events_arrive_as_they_are_sent(previews: PreviewRig) -> None:
    go_on = asyncio.Event()

    async def send_events(inside: Inside, head: bytes, reader, writer) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(3):
            event = b"data: %d\n\n" % number
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await go_on.wait()
            go_on.clear()
        writer.write(b"0\r\n\r\n")
        return False

    async with serving(send_events) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        await visitor.send(f"GET / HTTP/1.1\r\nHost: {previews.host(inside.port)}\r\n\r\n".encode())
        for number in range(3):  # each comes while the server waits to be told to go on
            await asyncio.wait_for(visitor.reader.readuntil(b"data: %d\n\n" % number), 20)
            go_on.set()
        await asyncio.wait_for(visitor.reader.readuntil(b"0\r\n\r\n"), 20)


async def test_expect_waits_for_the_server(previews: PreviewRig) -> None:
    async def refuse_or_take(inside: Inside, head: bytes, reader, writer) -> bool:
        if b"/refused" in head:
            writer.write(b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n")
            return False
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        inside.bodies.append(await reader.readexactly(4))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        return True

    async with serving(refuse_or_take) as inside:
        await previews.publish(inside.port, public=True)
        for target, answered in (("/refused", b"HTTP/1.1 417"), ("/taken", b"HTTP/1.1 100")):
            visitor = await previews.visitor()
            head = f"POST {target} HTTP/1.1\r\nHost: {previews.host(inside.port)}\r\nContent-Length: 4\r\n"
            await visitor.send(f"{head}Expect: 100-continue\r\n\r\n".encode())
            assert (await asyncio.wait_for(visitor.reader.readuntil(b"\r\n\r\n"), 20)).startswith(answered)
        assert inside.bodies == []
        await visitor.send(b"body")
        assert (await visitor.answer("POST")).status == 200
        assert inside.bodies == [b"body"]


async def test_a_server_that_ignores_expect_still_gets_the_body(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        head = f"POST / HTTP/1.1\r\nHost: {previews.host(inside.port)}\r\nContent-Length: 4\r\n"
        await visitor.send(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert (await asyncio.wait_for(visitor.reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 100")
        await visitor.send(b"body")
        assert (await visitor.answer("POST")).status == 200
        assert inside.bodies == [b"body"]


async def test_an_early_answer_to_a_large_body_reaches_the_visitor(previews: PreviewRig) -> None:
    async def refuse(inside: Inside, head: bytes, reader, writer) -> bool:
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()
        while await reader.read(65536):
            pass
        return False

    async with serving(refuse) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        head = f"POST / HTTP/1.1\r\nHost: {previews.host(inside.port)}\r\nContent-Length: 100000000\r\n\r\n"
        await visitor.send(head.encode() + b"x" * 100_000)
        answer = await visitor.answer("POST")
        assert (answer.status, answer.body) == (413, b"big")
        await visitor.ended()


WEBSOCKET = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ("Sec-WebSocket-Version", "13"),
]


async def upgrade_and_echo(inside: Inside, head: bytes, reader, writer) -> bool:
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-A: 1\r\n\r\nfirst"
    )
    while data := await reader.read(65536):
        writer.write(data.upper())
        await writer.drain()
    writer.write(b"LAST")
    return False


async def test_after_an_upgrade_bytes_pass_as_they_are(previews: PreviewRig) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        lines = [f"{name}: {value}" for name, value in WEBSOCKET]
        head = "\r\n".join(["GET /ws HTTP/1.1", f"Host: {previews.host(inside.port)}", *lines, "", ""])
        await visitor.send(head.encode() + b"early")
        answer = await asyncio.wait_for(visitor.reader.readuntil(b"\r\n\r\n"), 20)
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert b"x-a: 1" in answer.lower()
        assert inside.header("host") == previews.host(inside.port)
        assert inside.header("upgrade") == "websocket"
        assert inside.header("connection") == "Upgrade"
        assert await visitor.reader.readexactly(10) == b"firstEARLY"
        await visitor.send(b"\x81\x05hello")
        assert await visitor.reader.readexactly(7) == b"\x81\x05HELLO"
        visitor.writer.write_eof()  # an end passes, and the other side goes on until its own
        assert await visitor.ended() == b"LAST"


async def test_only_websockets_are_upgraded(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for protocol in ("h2c", "TLS/1.0", "tunnel", "cpuos-frames/1"):
            headers = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", protocol), ("HTTP2-Settings", "AAMAAABk")]
            answer = await visitor.request(host=previews.host(inside.port), headers=headers)
            assert answer.status == 200
            assert (inside.header("upgrade"), inside.header("http2-settings")) == (None, None)


async def test_a_refused_upgrade_is_an_ordinary_answer(previews: PreviewRig) -> None:
    async with serving(answering(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for _ in range(2):
            answer = await visitor.request(host=previews.host(inside.port), headers=WEBSOCKET)
            assert (answer.status, answer.body) == (403, b"no")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A : 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: 1\x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_a_server_that_speaks_no_http_is_told_so(previews: PreviewRig, raw: bytes) -> None:
    async with serving(answering(raw, close=True)) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        for _ in range(2):
            answer = await visitor.request(host=previews.host(inside.port))
            assert (answer.status, answer.one("x-cpuos-error")) == (502, "port_answer_invalid")


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_a_body_that_breaks_off_is_a_cut_connection(previews: PreviewRig, raw: bytes) -> None:
    async with serving(answering(raw, close=True)) as inside:
        await previews.publish(inside.port, public=True)
        with pytest.raises((h11.RemoteProtocolError, ConnectionError)):
            await previews.get(inside.port)


async def test_a_closed_port_says_so(previews: PreviewRig) -> None:
    async with serving() as inside:
        port = inside.port
    await previews.publish(port, public=True)
    answer = await previews.get(port)
    assert (answer.status, answer.one("x-cpuos-error")) == (502, "port_not_open")
    assert str(port).encode() in answer.body
    page = await previews.get(port, headers=[("Accept", "text/html,*/*;q=0.8")])
    assert (page.status, page.one("content-type")) == (502, "text/html; charset=utf-8")
    assert b"Port is not open" in page.body
    assert str(port).encode() in page.body
    assert page.one("cache-control") == "no-store"
    assert page.all("set-cookie") == []


async def test_an_unknown_sandbox_says_so(previews: PreviewRig) -> None:
    visitor = await previews.visitor()
    answer = await visitor.request(host=previews.host(3000, sandbox="z" * 20), headers=[("Accept", "text/html")])
    assert (answer.status, answer.one("x-cpuos-error")) == (404, "sandbox_not_found")
    assert b"Sandbox not found" in answer.body


async def test_a_silent_server_is_given_up(previews: PreviewRig) -> None:
    async def say_nothing(inside: Inside, head: bytes, reader, writer) -> bool:
        await reader.read()
        return False

    previews.rig.gateway.previews.times = PreviewTimes(answer_s=0.2)
    async with serving(say_nothing) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        answer = await visitor.request(host=previews.host(inside.port))
        assert (answer.status, answer.one("x-cpuos-error")) == (502, "port_answer_invalid")
        assert b"0.2 s" in answer.body
        answer = await visitor.request("POST", host=previews.host(inside.port), body=b"x" * 300_000)
        assert answer.status == 502


async def test_slow_heads_and_idle_connections_are_ended(previews: PreviewRig) -> None:
    gateway = previews.rig.gateway
    async with serving() as inside:
        await previews.publish(inside.port, public=True)
        gateway.previews.times = PreviewTimes(head_s=600, idle_s=0.3)
        idle = await previews.visitor()
        assert (await idle.request(host=previews.host(inside.port))).status == 200
        assert await idle.ended() == b""
        gateway.previews.times = PreviewTimes(head_s=0.3, idle_s=600)
        silent, slow = [await previews.visitor() for _ in range(2)]
        await slow.send(b"GET / HTTP/1.1\r\nHost: ")
        for visitor in (silent, slow):
            assert await visitor.ended() == b""


async def test_a_visitor_that_leaves_ends_the_tunnel(previews: PreviewRig) -> None:
    ended = asyncio.Event()

    async def stream(inside: Inside, head: bytes, reader, writer) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await reader.read()
        ended.set()
        return False

    async with serving(stream) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        await visitor.send(f"GET / HTTP/1.1\r\nHost: {previews.host(inside.port)}\r\n\r\n".encode())
        await asyncio.wait_for(visitor.reader.readuntil(b"\r\na\r\n"), 20)
        await visitor.close()
        await asyncio.wait_for(ended.wait(), 20)


async def test_a_visitor_that_ends_its_side_wants_no_answer(previews: PreviewRig) -> None:
    """Before the request was read or after: a closed tab looks so, and its stream must not go on."""
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port, public=True)
        head = f"GET / HTTP/1.1\r\nHost: {previews.host(inside.port)}\r\n\r\n".encode()
        for pause in (0, 0.1):
            visitor = await previews.visitor()
            await visitor.send(head)
            await asyncio.sleep(pause)
            visitor.writer.write_eof()
            await visitor.ended()
            await until(lambda: previews.rig.gateway.previews.admitted == {})


async def test_the_end_of_a_sandbox_ends_its_previews(previews: PreviewRig) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        lines = [f"{name}: {value}" for name, value in WEBSOCKET]
        head = "\r\n".join(["GET /ws HTTP/1.1", f"Host: {previews.host(inside.port)}", *lines, "", ""])
        await visitor.send(head.encode())
        await asyncio.wait_for(visitor.reader.readuntil(b"first"), 20)
        body = {"reason": "stopped", "text": "killed by a test"}
        await previews.rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json=body)
        await visitor.ended()
        answer = await previews.get(inside.port)
        assert (answer.status, answer.one("x-cpuos-error")) == (410, "sandbox_stopped")


async def test_a_sandbox_has_so_many_visitors_at_once(previews: PreviewRig) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port, public=True)
        slots = previews.rig.gateway.sandboxes.get(SANDBOX).slots
        limit = previews.rig.gateway.limits.previews
        for _ in range(limit):
            slots.take("previews")
        answer = await previews.get(inside.port)
        assert (answer.status, answer.one("x-cpuos-error")) == (429, "limit_reached")
        slots.give("previews")
        assert (await previews.get(inside.port)).status == 502  # it speaks only WebSocket


async def test_host_and_origin_can_be_localhost(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        own = ("Origin", f"http://{previews.host(inside.port)}")
        headers = [*previews.auth(inside.port, host="localhost"), own]
        assert (await previews.get(inside.port, headers=headers)).status == 200
        assert inside.header("host") == f"localhost:{inside.port}"
        assert inside.header("origin") == f"http://localhost:{inside.port}"
        assert inside.header("x-forwarded-host") == previews.host(inside.port)
        await previews.publish(inside.port, public=True, host="localhost")
        assert (await previews.get(inside.port)).status == 200
        assert inside.header("host") == f"localhost:{inside.port}"


async def test_previews_by_tls(previews: PreviewRig, tmp_path: Path) -> None:
    made = make_certificates(load_settings(state_dir=tmp_path / "made"))
    listener = {"tls_cert": str(made.certificate), "tls_key": str(made.key)}
    trusting = ssl.create_default_context(cafile=str(made.authority))
    async with serving() as plain, serving(upgrade_and_echo) as echoing, open_previews(previews.rig, **listener) as tls:
        assert tls.url.startswith("https://preview.localhost:")
        await tls.publish(plain.port)
        await tls.publish(echoing.port, public=True)

        async def connect(port: int) -> Visitor:
            name = tls.host(port).partition(":")[0]
            visitor = Visitor(*await asyncio.open_connection("127.0.0.1", tls.port, ssl=trusting, server_hostname=name))
            tls.visitors.append(visitor)
            return visitor

        visitor = await connect(plain.port)
        for body in (None, b"x" * 1_000_000):
            answer = await visitor.request(
                "POST" if body else "GET", host=tls.host(plain.port), headers=tls.auth(plain.port), body=body
            )
            assert (answer.status, answer.body) == (200, b"ok")
            assert plain.header("x-forwarded-proto") == "https"
        assert plain.bodies[-1] == body
        page = await visitor.request(
            target=f"/?cpuos_token={tls.token(plain.port)}",
            host=tls.host(plain.port),
            headers=[("Accept", "text/html")],
        )
        assert page.one("location") == f"https://{tls.host(plain.port)}/"
        upgraded = await connect(echoing.port)
        lines = [f"{name}: {value}" for name, value in WEBSOCKET]
        head = "\r\n".join(["GET /ws HTTP/1.1", f"Host: {tls.host(echoing.port)}", *lines, "", ""])
        await upgraded.send(head.encode())
        await asyncio.wait_for(upgraded.reader.readuntil(b"first"), 20)
        await upgraded.send(b"hello")
        assert await upgraded.reader.readexactly(5) == b"HELLO"


async def test_a_proxy_in_front_is_named_by_the_setting(previews: PreviewRig) -> None:
    async with (
        serving() as inside,
        serve_previews(
            previews.rig.gateway.previews, PreviewListener(port=0, public_url="https://preview.localhost")
        ) as url,
    ):
        assert url == "https://preview.localhost"
        assert previews.url == f"http://preview.localhost:{previews.port}"
        await previews.publish(inside.port, public=True)
        assert (await previews.get(inside.port)).status == 200
        assert inside.header("x-forwarded-proto") == "http"


@pytest.mark.parametrize(
    ("listener", "why"),
    [
        ({"tls_cert": "/nonexistent.pem"}, "No such file"),
        ({"tls_cert": __file__}, "cannot be used"),
        ({"host": "192.0.2.1"}, "cannot listen for previews"),
    ],
)
async def test_a_listener_that_cannot_be_says_why(previews: PreviewRig, listener: dict[str, str], why: str) -> None:
    with pytest.raises(SetupRequired) as raised:
        async with open_previews(previews.rig, **listener):
            pass
    assert why in str(raised.value)


async def test_mutated_requests_and_answers_fail_nothing(previews: PreviewRig) -> None:
    """Bytes changed, cut and doubled on both sides: visitors get an answer or a closed connection, never a fault."""
    previews.rig.gateway.previews.times = PreviewTimes(head_s=0.5, idle_s=0.5, answer_s=0.5, linger_s=0.5)
    dice = random.Random(7)

    def mutate(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(dice.randrange(4)):
            at = dice.randrange(len(changed))
            kind = dice.randrange(4)
            if kind == 0:
                changed[at] = dice.randrange(256)
            elif kind == 1:
                del changed[at : at + dice.randrange(8)]
            elif kind == 2:
                changed[at:at] = changed[at : at + dice.randrange(40)]
            else:
                changed[at:at] = dice.choice([b"\r\n", b"\n", b"\x00", b" ", b":", b"0\r\n\r\n", b"HTTP/1.1"])
        return bytes(changed)

    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nSet-Cookie: a=1; Domain=x\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 101 Up\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nabc",
    ]

    async def answer_badly(inside: Inside, head: bytes, reader, writer) -> bool:
        writer.write(mutate(dice.choice(answers)))
        return dice.random() < 0.5

    async with serving(answer_badly) as inside:
        await previews.publish(inside.port, public=True)
        host = previews.host(inside.port).encode()
        upgrade = "".join(f"{name}: {value}\r\n" for name, value in WEBSOCKET).encode()
        asked = [
            b"GET /a?b=c HTTP/1.1\r\nHost: %b\r\nCookie: a=1\r\nAccept: text/html\r\n\r\n" % host,
            b"POST / HTTP/1.1\r\nHost: %b\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" % host,
            b"POST / HTTP/1.1\r\nHost: %b\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello" % host,
            b"GET / HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (host, upgrade),
        ]

        async def visit() -> bytes:
            visitor = await previews.visitor()
            await visitor.send(mutate(dice.choice(asked)) + mutate(dice.choice(asked)))
            got = b""
            with suppress(TimeoutError, ConnectionResetError):
                while data := await asyncio.wait_for(visitor.reader.read(65536), 1.5):
                    got += data
            visitor.writer.transport.abort()
            return got

        for _ in range(10):
            for got in await asyncio.gather(*[visit() for _ in range(30)]):
                assert b" 500 " not in got.partition(b"\r\n")[0]
                assert b'"internal"' not in got
        agent = previews.rig.gateway.sandboxes.get(SANDBOX)
        await until(lambda: previews.rig.gateway.previews.admitted == {})
        assert agent.slots._taken["previews"] == 0
