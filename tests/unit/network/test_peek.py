"""The peek between real clients and servers, behind the kernel's own rules."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time

import pytest
from peek_rig import OTHER, WEB, PeekRig, echo, learned, tell_requests
from test_client_hello import GOOD, hello_of, made_by_python, server_name

from cpuos.node.network.peek.sandbox import PeekLimits
from cpuos.testing.waiting import until
from router_world import router_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ALLOW = {"allow": ["*.allowed.test", "git.allowed.test:22", "api.allowed.test:8443"]}
DATA = b"\x17\3\3\0\5hello"  # what a TLS session says behind its hello
NAMES = learned(www_allowed_test=WEB, git_allowed_test=WEB, api_allowed_test=WEB)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with router_world(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture
async def rig(world):
    async for made in _rig(world, PeekLimits(name_s=60, dial_s=60)):
        yield made


@pytest.fixture
async def hasty(world):
    async for made in _rig(world, PeekLimits(name_s=1.0, dial_s=1.0)):
        yield made


async def _rig(world, limits):
    made = PeekRig(world, limits=limits)
    await made.use(ALLOW, names=NAMES)
    yield made
    await made.close()
    world.fresh()


def get(host: str, path: str = "/", *, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()


async def test_an_allowed_name_is_carried_and_recorded(rig):
    async with rig.server(443, echo, tls=True):
        reader, writer = await rig.connect_tls(WEB, 443, name="www.allowed.test")
        assert writer.get_extra_info("ssl_object").getpeercert()["subjectAltName"] == (("DNS", "www.allowed.test"),)
        writer.write(b"x" * 100_000)
        assert await reader.readexactly(100_000) == b"x" * 100_000
        [opened] = await rig.told_of("open")
        writer.close()
        [closed] = await rig.told_of("closed")
    assert (opened["name"], opened["address"], opened["port"]) == ("www.allowed.test", WEB, 443)
    assert opened["rule"] == "sandbox allow *.allowed.test"
    assert closed["id"] == opened["id"]
    assert closed["bytes_sent"] > 100_000
    assert closed["bytes_received"] > 100_000


@pytest.mark.parametrize("size", [1, 7, 20])
async def test_a_hello_in_pieces(rig, size):
    async with rig.server(443, echo):
        reader, writer = await rig.connect(WEB, 443)
        hello = hello_of(server_name(b"www.allowed.test"))
        for at in range(0, len(hello), size):
            writer.write(hello[at : at + size])
            await asyncio.sleep(0.001)
        assert await reader.readexactly(len(hello)) == hello
        writer.close()


REFUSED = {
    "denied name": (443, made_by_python("www.denied.test"), "not in the sandbox allow list", "www.denied.test"),
    "the wildcard's own name": (443, made_by_python("allowed.test"), "not in the sandbox allow list", "allowed.test"),
    "a name that only ends alike": (
        443,
        made_by_python("notallowed.test"),
        "not in the sandbox allow list",
        "notallowed.test",
    ),
    "no name": (443, made_by_python(None), "no host name can be read: the TLS hello has none", None),
    "address as name": (443, hello_of(server_name(WEB.encode())), "no host name can be read: an address", None),
    "plain HTTP on 443": (443, get("www.allowed.test"), "no host name can be read: it does not begin as TLS", None),
    "SSL 2": (443, b"\x80\x2e\x01\x03\x01\x00\x15\x00\x00", "no host name can be read: an SSL 2 hello", None),
    "something else": (443, b"SSH-2.0-x\r\n", "no host name can be read", None),
    "denied Host": (80, get("www.denied.test"), "not in the sandbox allow list", "www.denied.test"),
    "no Host": (80, b"GET / HTTP/1.1\r\n\r\n", "no host name can be read: an HTTP request has no Host", None),
    "address as Host": (80, get(WEB), "not in the sandbox allow list", None),
    "another address as Host": (80, get("1.1.1.1"), "the request is for another address", None),
    "HTTP/2 in clear": (80, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "no host name can be read", None),
    "TLS by another port": (8443, made_by_python("www.denied.test"), "not in the sandbox allow list", None),
    "HTTP by another port": (8443, get("www.denied.test:8443"), "not in the sandbox allow list", None),
    "bent HTTP by another port": (8443, b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", "no host name can be read", None),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refusals_are_resets_with_a_record(rig, case):
    port, data, rule, name = REFUSED[case]
    taken = []

    async def note(reader, writer):
        taken.append(await reader.read(100))

    async with rig.server(port, note):
        with pytest.raises(ConnectionResetError):
            await rig.ask(WEB, port, data)
        [refused] = await rig.told_of("refused")
    assert not any(taken), "the server was told something"
    assert refused["rule"].startswith(rule)
    assert (refused["address"], refused["port"], refused["verdict"]) == (WEB, port, "refused")
    if name:
        assert refused["name"] == name


async def test_a_forged_name_reaches_no_other_address(rig):
    """Only addresses that the forwarder answered for allowed names get as far as the peek."""
    async with rig.server(443, echo):
        with pytest.raises(ConnectionRefusedError):
            await rig.ask(OTHER, 443, made_by_python("www.allowed.test"))
    assert rig.told() == []


async def test_the_peek_itself_cannot_be_spoken_to(rig):
    with pytest.raises(ConnectionRefusedError):
        await rig.connect("10.0.0.1", 8443)


async def test_silence_is_refused_in_time(hasty):
    started = time.monotonic()
    with pytest.raises(ConnectionResetError):
        await hasty.ask(WEB, 443, b"")
    assert time.monotonic() - started > 0.9
    [refused] = await hasty.told_of("refused")
    assert "did not come in time" in refused["rule"]


@pytest.mark.parametrize("data", [GOOD[:40], b"GET / HTTP/1.1\r\nHost: www"])
async def test_slow_beginnings_are_refused_in_time(hasty, data):
    _, writer = await hasty.connect(WEB, 443 if data[:1] == b"\x16" else 80)

    async def drip() -> None:
        for byte in data * 100:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    started = time.monotonic()
    with pytest.raises(ConnectionError):
        await drip()
    assert time.monotonic() - started < 40, "it would have gone on for longer"
    writer.close()


async def test_ending_before_a_name_is_recorded(rig):
    _, writer = await rig.connect(WEB, 443)
    writer.close()
    [refused] = await rig.told_of("refused")
    assert refused["rule"].startswith("no host name can be read")


async def test_every_request_of_a_kept_connection_obeys(rig):
    async with rig.server(80, tell_requests):
        reader, writer = await rig.connect(WEB, 80)
        for path in ("/one", "/two"):
            writer.write(get("www.allowed.test", path))
            assert (await _answer(reader)).startswith(f"www.allowed.test {path} ")
        writer.write(get("b.allowed.test", "/three", more="Content-Length: 3\r\n") + b"abc")
        assert (await _answer(reader)).startswith("b.allowed.test /three 3")
        writer.write(get("www.denied.test"))
        with pytest.raises(ConnectionError):
            await _answer(reader)
        writer.close()
        [refused] = await rig.told_of("refused")
    assert refused["name"] == "www.denied.test"


async def test_a_request_hidden_behind_another_is_seen(rig):
    seen = []

    async def note(reader, writer):
        while data := await reader.read(1000):
            seen.append(data)

    async with rig.server(80, note):
        with pytest.raises(ConnectionResetError):
            await rig.ask(WEB, 80, get("www.allowed.test") + get("www.denied.test"))
    assert b"denied" not in b"".join(seen)


async def test_a_websocket_passes_and_what_is_no_websocket_does_not(rig):
    asks = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    async with rig.server(80, tell_requests):
        reader, writer = await rig.connect(WEB, 80)
        writer.write(get("www.allowed.test", "/ws", more=asks) + b"\x81\x05early")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        assert await reader.readexactly(7) == b"\x81\x05early"
        writer.write(get("www.denied.test"))  # only bytes now
        assert await reader.readexactly(len(get("www.denied.test"))) == get("www.denied.test")
        writer.close()
        reader, writer = await rig.connect(WEB, 80)
        writer.write(get("www.allowed.test", "/decline", more=asks) + get("www.denied.test"))
        with pytest.raises(ConnectionError):
            await reader.readexactly(1000)
        writer.close()
        [refused] = await rig.told_of("refused")
    assert refused["name"] == "www.denied.test"


async def test_early_use_of_a_declined_websocket_obeys(rig):
    asks = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    async with rig.server(80, tell_requests):
        reader, writer = await rig.connect(WEB, 80)
        writer.write(get("www.allowed.test", "/decline", more=asks) + get("www.allowed.test", "/next"))
        assert "/decline" in await _answer(reader)
        assert "/next" in await _answer(reader)
        writer.close()


async def test_a_port_named_in_the_policy_carries_anything(rig):
    async def speak_first(reader, writer):
        writer.write(b"SSH-2.0-server\r\n")
        await echo(reader, writer)

    async with rig.server(22, speak_first):
        reader, writer = await rig.connect(WEB, 22)
        assert await reader.readline() == b"SSH-2.0-server\r\n"  # the guest says nothing before
        for data in (b"SSH-2.0-client\r\n", b"\0\0\1\2binary"):
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
        writer.close()
        assert await rig.ask_and_end(WEB, 22, b"no line end") == b"SSH-2.0-server\r\nno line end"
        opened = await rig.told_of("open", 2)
    assert {record["rule"] for record in opened} == {"sandbox allow git.allowed.test:22"}


async def test_a_late_hello_on_a_silent_port_is_judged(rig):
    async def speak_first(reader, writer):
        writer.write(b"hello\r\n")
        await echo(reader, writer)

    async with rig.server(22, speak_first):
        reader, writer = await rig.connect(WEB, 22)
        await reader.readline()
        writer.write(made_by_python("www.denied.test"))
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)
        writer.close()


async def test_an_allowed_name_by_another_port(rig):
    async with rig.server(8443, echo, tls=True):
        reader, writer = await rig.connect_tls(WEB, 8443, name="api.allowed.test")
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()
        [opened] = await rig.told_of("open")
    assert opened["rule"] == "sandbox allow api.allowed.test:8443"


async def test_half_closed_connections_are_carried_to_their_end(rig):
    async def answer_at_the_end(reader, writer):
        taken = await reader.read()
        writer.write(taken[::-1])

    async with rig.server(22, answer_at_the_end):
        data = os.urandom(3_000_000)
        assert await rig.ask_and_end(WEB, 22, data) == data[::-1]


async def test_a_reset_reaches_the_other_side(rig):
    ended = asyncio.Event()

    async def wait_for_reset(reader, writer):
        try:
            while await reader.read(1000):
                pass
        except ConnectionResetError:
            ended.set()

    async with rig.server(22, wait_for_reset):
        _, writer = await rig.connect(WEB, 22)
        writer.write(b"\0hello")
        await rig.told_of("open")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        async with asyncio.timeout(30):
            await ended.wait()


async def test_a_server_that_is_not_there_is_a_reset(hasty):
    with pytest.raises(ConnectionResetError):
        await hasty.ask(WEB, 443, made_by_python("www.allowed.test"))
    [closed] = await hasty.told_of("closed")
    assert closed["bytes_sent"] == 0


async def test_a_policy_that_changes_cuts_what_it_refuses(rig):
    async with rig.server(443, echo), rig.server(80, tell_requests), rig.server(22, echo):
        www, api = await _start(rig, "www.allowed.test"), await _start(rig, "api.allowed.test")
        git = await rig.connect(WEB, 22)
        git[1].write(b"\0raw")
        assert await git[0].readexactly(4) == b"\0raw"
        rig.told()
        await rig.use({"allow": ["www.allowed.test", "git.allowed.test:22"]}, version=2, names=NAMES)
        with pytest.raises(ConnectionError):
            await api[0].readexactly(1)
        www[1].write(DATA)
        assert await www[0].readexactly(len(DATA)) == DATA
        git[1].write(b"too")
        assert await git[0].readexactly(3) == b"too"
        [refused] = await rig.told_of("refused")
        assert (refused["name"], refused["rule"]) == ("api.allowed.test", "not in the sandbox allow list")
        # Another name in its place: which one the open connection is for cannot be told.
        await rig.use({"allow": ["www.allowed.test", "other.test:22"]}, version=3, names=NAMES)
        with pytest.raises(ConnectionError):
            await git[0].readexactly(1)
        await rig.use("off", version=4)
        with pytest.raises(ConnectionError):
            await www[0].readexactly(1)
        for _, writer in (www, api, git):
            writer.close()


async def test_denied_names_while_everything_else_is_allowed(rig):
    await rig.use({"deny": ["*.denied.test"]}, version=2)
    async with rig.server(443, echo), rig.server(80, tell_requests):
        hello = made_by_python("www.any.test")
        reader, writer = await rig.connect(OTHER, 443)
        writer.write(hello)
        assert await reader.readexactly(len(hello)) == hello
        writer.close()
        assert await rig.ask(OTHER, 80, get(OTHER, more="Connection: close\r\n"))  # plain HTTP by address
        for port, data in ((443, made_by_python("www.denied.test")), (80, get("x.denied.test"))):
            with pytest.raises(ConnectionResetError):
                await rig.ask(OTHER, port, data)
        refused = await rig.told_of("refused", 2)
    assert {record["rule"] for record in refused} == {"sandbox deny *.denied.test"}


async def test_many_idle_connections_and_the_cap(rig):
    async with rig.server(443, echo):
        held = await asyncio.gather(*(_start(rig, "www.allowed.test") for _ in range(200)))
        assert (await _start(rig, "www.allowed.test"))[0]
        more = await asyncio.gather(*(_try(rig) for _ in range(80)))
        assert more.count("carried") == 55
        assert more.count("reset") == 25
        refused = await rig.told_of("refused", 25)
        assert {record["rule"] for record in refused} == {"limit: 256 connections by name at once"}
        held[0][1].write(DATA)
        assert await held[0][0].readexactly(len(DATA)) == DATA
        for _, writer in held:
            writer.transport.abort()


async def test_sockets_are_ordered_ahead(rig):
    async with rig.server(443, echo):
        for _ in range(40):
            _, writer = await _start(rig, "www.allowed.test")
            writer.close()
    assert 3 <= rig.orders <= 15


async def test_a_connection_without_a_socket_is_recorded(rig, monkeypatch):
    monkeypatch.setattr("cpuos.node.network.peek.stock._WAIT_S", 0.2)

    async def busy(count: int) -> None:
        raise OSError("the node is busy")

    assert rig.peek is not None
    while rig.peek.stock._filling is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    rig.peek.stock._order = busy
    while rig.peek.stock._sockets:
        rig.peek.stock._sockets.popleft().close()
    with pytest.raises(ConnectionResetError):
        await rig.ask(WEB, 443, made_by_python("www.allowed.test"))
    [refused] = await rig.told_of("refused")
    assert (refused["name"], refused["rule"]) == ("www.allowed.test", "limit: the node gave no socket in time")


async def test_closing_gives_everything_back(world):
    before = len(os.listdir("/proc/self/fd"))
    rig = PeekRig(world)
    await rig.use(ALLOW, names=NAMES)
    async with rig.server(443, echo):
        reader, writer = await _start(rig, "www.allowed.test")
        waiting = await rig.connect(WEB, 443)
        assert rig.peek is not None
        await rig.peek.close()
        rig.peek = None
        for ended in (reader, waiting[0]):
            with pytest.raises(ConnectionError):
                await ended.readexactly(1)
        for one in (writer, waiting[1]):
            one.close()
    await rig.close()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)


async def test_a_slow_reader_holds_little(rig):
    """What a reader does not take stays with the sender, not here."""

    async def flood(reader, writer):
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()

    async with rig.server(22, flood):
        held = [await rig.connect(WEB, 22) for _ in range(20)]
        for _, writer in held:
            writer.transport.pause_reading()
        await asyncio.sleep(0.5)
        assert rig.held <= 12 << 20
        for _, writer in held:
            writer.transport.abort()
        await until(lambda: rig.held == 0)


async def _answer(reader) -> str:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.decode().lower().split("content-length: ")[1].split("\r\n")[0])
    return (await reader.readexactly(length)).decode()


async def _start(rig, name: str):
    """A connection that is carried."""
    reader, writer = await rig.connect(WEB, 443)
    hello = hello_of(server_name(name.encode()))
    writer.write(hello)
    assert await reader.readexactly(len(hello)) == hello
    return reader, writer


async def _try(rig) -> str:
    try:
        await _start(rig, "www.allowed.test")
    except (ConnectionError, asyncio.IncompleteReadError):
        return "reset"
    return "carried"


async def test_what_costs_much_to_read_waits_its_turn(world):
    """A body in chunks of one byte, which takes more of the process than it is worth."""
    taken = bytearray()

    async def swallow(reader, writer):
        while data := await reader.read(1 << 20):
            taken.extend(data)

    rig = PeekRig(world, limits=PeekLimits(reading_share=0.001, reading_burst_s=0.0))
    await rig.use(ALLOW, names=NAMES)
    async with rig.server(80, swallow):
        _, writer = await rig.connect(WEB, 80)
        writer.write(get("www.allowed.test", more="Transfer-Encoding: chunked\r\n"))
        await rig.told_of("open")
        body = b"1\r\nx\r\n" * 300_000
        writer.write(body)
        await until(lambda: len(taken) > 1000)
        hello = made_by_python("www.allowed.test")
        async with rig.server(443, echo):  # others are served meanwhile
            assert await rig.ask_and_end(WEB, 443, hello) == hello
        assert len(taken) < len(body) // 2
        writer.transport.abort()
    await rig.close()
    world.fresh()
