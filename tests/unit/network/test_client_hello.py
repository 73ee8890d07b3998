"""The name in a ClientHello: made by real clients, cut into pieces, and bent."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import struct
import subprocess
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuos.node.network.peek.hello import MAX_HELLO_BYTES, ClientHello, HelloParser, SecondHello, host_name


def made_by_python(
    name: str | None,
    *,
    lowest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2,
    highest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    alpn: int = 0,
) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version, context.maximum_version = lowest, highest
    context.check_hostname = False
    if alpn:
        context.set_alpn_protocols([f"{number:03d}" + "x" * 200 for number in range(alpn)])
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def read(data: bytes, *, size: int | None = None) -> ClientHello | None:
    parser = HelloParser()
    step = size or len(data)
    for start in range(0, len(data), step):
        hello = parser.feed(data[start : start + step])
        if hello is not None:
            assert start + step >= len(data), "done before its end"
            return hello
    return None


def extension(kind: int, body: bytes) -> bytes:
    return struct.pack("!HH", kind, len(body)) + body


def server_name(name: bytes, *, kind: int = 0, more: bytes = b"") -> bytes:
    names = struct.pack("!BH", kind, len(name)) + name + more
    return extension(0, struct.pack("!H", len(names)) + names)


def body_of(*extensions: bytes, version: bytes = b"\3\3", session: bytes = b"", suites: bytes = b"\x13\1") -> bytes:
    body = version + bytes(32) + bytes([len(session)]) + session + struct.pack("!H", len(suites)) + suites + b"\1\0"
    joined = b"".join(extensions)
    return body + (struct.pack("!H", len(joined)) + joined if extensions else b"")


def message_of(body: bytes, *, kind: int = 1) -> bytes:
    return bytes([kind]) + len(body).to_bytes(3) + body


def records_of(message: bytes, *, size: int = 1 << 14, version: bytes = b"\3\1", kind: int = 22) -> bytes:
    pieces = [message[start : start + size] for start in range(0, len(message), size)]
    return b"".join(bytes([kind]) + version + struct.pack("!H", len(piece)) + piece for piece in pieces)


def hello_of(*extensions: bytes) -> bytes:
    return records_of(message_of(body_of(*extensions)))


GOOD = hello_of(extension(10, b"\0\2\0\x1d"), server_name(b"www.allowed.example"))


@pytest.mark.parametrize("size", [None, 1, 2, 3, 5, 20, 100])
@pytest.mark.parametrize("highest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_hello_of_python(highest: ssl.TLSVersion, size: int | None) -> None:
    hello = read(made_by_python("www.Allowed.example", highest=highest), size=size)
    assert hello is not None
    assert hello.name == "www.allowed.example"


def test_hello_without_a_name() -> None:
    hello = read(made_by_python(None))
    assert hello is not None
    assert hello.name is None


def test_hello_over_several_records() -> None:
    made = made_by_python("www.allowed.example", alpn=100)
    assert len(made) > 16384 + 5
    hello = read(made)
    assert hello is not None
    assert hello.name == "www.allowed.example"


def _first_bytes_of(command: list[str]) -> bytes:
    """What a program sends first to a listener on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        port = listener.getsockname()[1]
        taken: list[bytes] = []

        def take() -> None:
            connection, _ = listener.accept()
            with connection:
                taken.append(connection.recv(65536))

        thread = threading.Thread(target=take)
        thread.start()
        subprocess.run(
            [part.format(port=port) for part in command], stdin=subprocess.DEVNULL, capture_output=True, timeout=20
        )
        thread.join()
    return taken[0]


@pytest.mark.parametrize(
    "command",
    [
        ["curl", "-sk", "--connect-to", "www.allowed.example:443:127.0.0.1:{port}", "https://www.allowed.example/"],
        ["openssl", "s_client", "-connect", "127.0.0.1:{port}", "-servername", "www.allowed.example"],
        ["openssl", "s_client", "-tls1_2", "-connect", "127.0.0.1:{port}", "-servername", "www.allowed.example"],
    ],
    ids=["curl", "openssl", "openssl-tls1.2"],
)
def test_hello_of_other_programs(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    hello = read(_first_bytes_of(command))
    assert hello is not None
    assert hello.name == "www.allowed.example"


def test_dummy_encrypted_hello_changes_nothing() -> None:
    hello = read(hello_of(server_name(b"outer.example"), extension(0xFE0D, bytes(200))))
    assert hello is not None
    assert (hello.name, hello.has_encrypted_hello) == ("outer.example", True)


@pytest.mark.parametrize(
    ("written", "understood"),
    [
        (b"UPPER.Example", "upper.example"),
        (b"dot.example.", "dot.example"),
        (b"xn--bcher-kva.example", "xn--bcher-kva.example"),
        (b"with_underscore.example", "with_underscore.example"),
        (b"localhost", "localhost"),
    ],
)
def test_names_are_understood(written: bytes, understood: str) -> None:
    hello = read(hello_of(server_name(written)))
    assert hello is not None
    assert hello.name == understood


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b".",
        b"..",
        b"a..b",
        b"two.dots..",
        b"-a.example",
        b"a-.example",
        b"1.2.3.4",
        b"1.2.3.4.",
        b"127.1",
        b"2130706433",
        b"0x7f.1",
        b"a.0x7f000001",
        b"::1",
        b"[::1]",
        b"fe80::1%eth0",
        b"sp ace.example",
        b"nul\0.example",
        b"allowed.example\0.evil.example",
        b"a/b.example",
        b"user@a.example",
        b"a.example:443",
        "bücher.example".encode(),
        "ａllowed.example".encode(),
        b"\xff\xfe",
        b"a" * 64 + b".example",
        b"a." * 127 + b"example",
        b"*.allowed.example",
    ],
)
def test_what_is_no_name_is_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match=r"host|server name|length"):
        read(hello_of(server_name(name)))


BENT = {
    "plain HTTP": b"GET / HTTP/1.1\r\n",
    "SSL 2 hello": b"\x80\x2e\x01\x03\x01\x00\x15\x00\x00\x00\x10",
    "SSL 2 hello, long header": b"\x80\x00\x01",
    "alert": b"\x15\3\3\0\2\1\0",
    "record of SSL 2": records_of(message_of(body_of()), version=b"\2\0"),
    "record of an unknown version": records_of(message_of(body_of()), version=b"\3\5"),
    "empty record": b"\x16\3\1\0\0" + GOOD,
    "record over 16 KiB": b"\x16\3\1\x40\1" + bytes(0x4001),
    "no hello": records_of(message_of(body_of(), kind=2)),
    "alert within": records_of(message_of(body_of(server_name(b"a.example"))), size=10)[:15] + b"\x15\3\3\0\2\1\0",
    "two extensions of one kind": hello_of(extension(10, b""), server_name(b"a.example"), extension(10, b"")),
    "two server names": hello_of(server_name(b"a.example"), server_name(b"b.example")),
    "two names in one": hello_of(server_name(b"a.example", more=b"\0\0\x09b.example")),
    "name of another kind": hello_of(server_name(b"a.example", kind=1)),
    "empty name list": hello_of(extension(0, b"\0\0")),
    "server's form of the extension": hello_of(extension(0, b"")),
    "bytes behind the name": hello_of(extension(0, b"\0\x0c\0\0\x09a.exampleXX")),
    "name length out of it": hello_of(extension(0, b"\0\x0c\0\1\xffa.example")),
    "extension length out of it": hello_of(b"\0\0\xff\xff\0"),
    "bytes behind the extensions": records_of(message_of(body_of(server_name(b"a.example")) + b"x")),
    "long session id": records_of(message_of(body_of(server_name(b"a.example"), session=bytes(33)))),
    "no cipher": records_of(message_of(body_of(server_name(b"a.example"), suites=b""))),
    "half a cipher": records_of(message_of(body_of(server_name(b"a.example"), suites=b"\x13\1\x13"))),
    "version of the hello": records_of(message_of(body_of(server_name(b"a.example"), version=b"\2\0"))),
    "second message in the record": records_of(message_of(body_of(server_name(b"a.example"))) * 2),
    "announced too long": records_of(b"\1\xff\xff\xff" + bytes(100)),
    "in too many records": records_of(message_of(body_of(extension(21, bytes(200)))), size=1),
    "body cut short": records_of(b"\1\0\0\x05" + bytes(5)),
}


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("case", BENT)
def test_bent_hellos_are_refused(case: str, size: int | None) -> None:
    with pytest.raises(ValueError, match=r"TLS|SSL|hello"):
        read(BENT[case], size=size)


def test_too_long_is_refused_before_it_ends() -> None:
    parser = HelloParser()
    piece = records_of(b"\1\0\xff\xff" + bytes(16000))
    assert parser.feed(piece) is None
    endless = records_of(bytes(16000))
    for _ in range(MAX_HELLO_BYTES // 16005 - 1):
        assert parser.feed(endless) is None
    with pytest.raises(ValueError, match="too long"):
        parser.feed(endless)


def test_records_of_one_byte() -> None:
    message = message_of(body_of(server_name(b"a.example")))
    hello = read(records_of(message, size=1), size=3)
    assert hello is not None
    assert hello.name == "a.example"


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_wait(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert HelloParser().feed(data) is None


@settings(max_examples=400)
@given(st.data())
def test_changed_bytes_never_do_worse_than_refuse(data: st.DataObject) -> None:
    made = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        made[data.draw(st.integers(0, len(made) - 1))] = data.draw(st.integers(0, 255))
    try:
        hello = read(bytes(made))
    except ValueError:
        return
    assert hello is None or hello.name is None or host_name(hello.name) == hello.name


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 60))
def test_pieces_do_not_matter(sizes: list[int], record: int) -> None:
    data = records_of(message_of(body_of(server_name(b"www.allowed.example"), extension(51, bytes(90)))), size=record)
    parser, hello = HelloParser(), None
    while data and hello is None:
        size = sizes[0]
        sizes = sizes[1:] + sizes[:1]
        hello = parser.feed(data[:size])
        data = data[size:]
    assert hello is not None
    assert hello.name == "www.allowed.example"


# a second hello

FIRST = ClientHello(name="a.example", has_encrypted_hello=False, has_early_data=False)
CHANGE_CIPHER = b"\x14\3\3\0\1\1"


def test_second_hello_of_the_same_host_passes() -> None:
    watch = SecondHello(FIRST)
    second = CHANGE_CIPHER + hello_of(server_name(b"a.example"))
    passed = b"".join(watch.feed(second[at : at + 7]) for at in range(0, len(second), 7))
    assert passed == second
    assert watch.is_over


@pytest.mark.parametrize("record", [3, 16000])
def test_second_hello_of_another_host_is_refused(record: int) -> None:
    watch = SecondHello(FIRST)
    second = records_of(message_of(body_of(server_name(b"b.example"))), size=record)
    with pytest.raises(ValueError, match="another host"):
        watch.feed(CHANGE_CIPHER + second)


# What is left of a hello that servers take, or of the way to it: test_second_hellos.py asks OpenSSL.
@pytest.mark.parametrize(
    "second",
    [
        b"\x15\3\3\0\2\1\x5a" + hello_of(server_name(b"b.example")),
        b"\x15\3\3\0\2\2\x5a" + hello_of(server_name(b"b.example")),
        records_of(message_of(body_of(server_name(b"b.example"), version=b"\x7f\xff"))),
        records_of(message_of(body_of(server_name(b"b.example"), suites=b"\x13\1" * 32000))),
        records_of(
            message_of(body_of(extension(21, bytes(9000)), server_name(b"b.example"), suites=b"\x13\1" * 32000))
        ),
    ],
    ids=["behind a warning", "behind a fatal one", "of another version", "long", "too long"],
)
def test_second_hellos_in_disguise_are_refused(second: bytes) -> None:
    with pytest.raises(ValueError, match=r"second TLS hello|unknown version"):
        SecondHello(FIRST).feed(CHANGE_CIPHER + second)


def test_second_hello_after_early_data_is_seen() -> None:
    watch = SecondHello(ClientHello(name="a.example", has_encrypted_hello=False, has_early_data=True))
    early = records_of(bytes(16000), kind=23)
    assert watch.feed(early) == early
    assert not watch.is_over
    with pytest.raises(ValueError, match="another host"):
        watch.feed(hello_of(server_name(b"b.example")))


@pytest.mark.parametrize(
    "following",
    [
        records_of(bytes(40), kind=23),
        CHANGE_CIPHER + records_of(bytes(64), kind=23),
        records_of(b"\x10\0\0\x21" + bytes(33)) + CHANGE_CIPHER + records_of(b"\1" * 40),
        CHANGE_CIPHER + records_of(b"\1" + bytes(39)),
        CHANGE_CIPHER + records_of(b"\1" * 40) + records_of(bytes(40), kind=23),
    ],
    ids=["data", "TLS 1.3", "TLS 1.2", "TLS 1.2 resumed", "TLS 1.2 resumed, much like a hello"],
)
def test_what_usually_follows_passes(following: bytes) -> None:
    watch = SecondHello(FIRST)
    assert watch.feed(following + b"anything") == following + b"anything"
    assert watch.is_over


def test_an_alert_passes() -> None:
    alert = b"\x15\3\3\0\2\2\x28"
    assert SecondHello(FIRST).feed(alert) == alert


def test_what_is_no_tls_does_not_follow() -> None:
    with pytest.raises(ValueError, match="no TLS"):
        SecondHello(FIRST).feed(b"GET / HTTP/1.1\r\n")


def test_many_small_records_behind_early_data_pass() -> None:
    watch = SecondHello(ClientHello(name="a.example", has_encrypted_hello=False, has_early_data=True))
    small = records_of(bytes(30), kind=23)
    for _ in range(1000):
        assert watch.feed(small) == small


def test_endless_small_records_are_refused():
    with pytest.raises(ValueError, match="too many"):
        SecondHello(FIRST).feed(CHANGE_CIPHER * 1000)


def test_endless_early_data_is_not_read_for_ever() -> None:
    watch = SecondHello(ClientHello(name="a.example", has_encrypted_hello=False, has_early_data=True))
    for _ in range(20):
        watch.feed(records_of(bytes(16384), kind=23))
    assert watch.is_over
