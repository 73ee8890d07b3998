"""A host name that changes within one handshake: what a real server would take, the peek has to see."""

from __future__ import annotations

import ssl
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cpuos.node.network.peek.hello import HelloParser, SecondHello
from cpuos.testing.sealed import Authority

ALLOWED, DENIED = b"www.allowed.example", b"www.denied.example"
WARNING, CHANGE_CIPHER = b"\x15\3\3\0\2\1\x5a", b"\x14\3\3\0\1\1"
P256, X25519 = 0x17, 0x1D
TLS13_SUITE = b"\x13\1"


class Server:
    """OpenSSL, up to its wish for another hello: the first one offers no key."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        context = Authority().server_context(folder)
        context.sni_callback = lambda connection, name, context: self.asked.append(name)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._made = context.wrap_bio(self._in, self._out, server_side=True)

    def take(self, data: bytes) -> bytes:
        self._in.write(data)
        with pytest.raises(ssl.SSLWantReadError):
            self._made.do_handshake()
        return self._out.read()


def extension(kind: int, body: bytes) -> bytes:
    return struct.pack("!HH", kind, len(body)) + body


def hello(name: bytes, *, share: bytes = b"", version: bytes = b"\3\3", suites: bytes = TLS13_SUITE) -> bytes:
    server_name = struct.pack("!HBH", len(name) + 3, 0, len(name)) + name
    parts = [
        extension(0, server_name),
        extension(10, struct.pack("!HHH", 4, P256, X25519)),
        extension(13, b"\0\4\4\3\x08\4"),
        extension(43, b"\2\3\4"),
        extension(51, struct.pack("!H", len(share)) + share),
    ]
    extensions = b"".join(parts)
    body = version + bytes(32) + b"\x20" + bytes(32) + struct.pack("!H", len(suites)) + suites + b"\1\0"
    body += struct.pack("!H", len(extensions)) + extensions
    message = b"\1" + len(body).to_bytes(3) + body
    pieces = [message[start : start + 16000] for start in range(0, len(message), 16000)]
    return b"".join(b"\x16\3\3" + struct.pack("!H", len(piece)) + piece for piece in pieces)


def share_for(answer: bytes) -> bytes:
    """The key that the server asks for."""
    group = int.from_bytes(answer[answer.index(b"\0\x33\0\2") + 4 :][:2])
    if group == P256:
        key = ec.generate_private_key(ec.SECP256R1()).public_key()
        public = key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    else:
        public = X25519PrivateKey.generate().public_key().public_bytes_raw()
    return struct.pack("!HH", group, len(public)) + public


@pytest.mark.parametrize(
    ("before", "fields"),
    [
        ([], {}),
        ([CHANGE_CIPHER], {}),
        ([WARNING], {}),
        ([CHANGE_CIPHER, WARNING, WARNING], {}),
        ([], {"version": b"\4\3"}),
        ([], {"version": b"\x7f\xff"}),
        ([], {"suites": TLS13_SUITE * 32000}),
    ],
    ids=["plain", "TLS 1.3", "warning", "warnings", "version 4.3", "version 127", "long"],
)
def test_a_second_name_is_seen(tmp_path: Path, before: Sequence[bytes], fields: dict[str, bytes]) -> None:
    server = Server(tmp_path)
    first = hello(ALLOWED)
    share = share_for(server.take(first))
    second = b"".join(before) + hello(DENIED, share=share, **fields)
    server.take(second)
    assert server.asked == [ALLOWED.decode(), DENIED.decode()], "this would have been served by another name"

    read = HelloParser().feed(first)
    assert read is not None
    with pytest.raises(ValueError, match=r"second TLS hello|unknown version"):
        SecondHello(read).feed(second)


def test_the_same_name_passes(tmp_path: Path) -> None:
    server = Server(tmp_path)
    first = hello(ALLOWED)
    second = CHANGE_CIPHER + hello(ALLOWED, share=share_for(server.take(first)))
    assert server.take(second)
    read = HelloParser().feed(first)
    assert read is not None
    assert SecondHello(read).feed(second) == second
