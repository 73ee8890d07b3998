"""The host name in a TLS ClientHello, read as it arrives. Pure: bytes in, a hello out, or ValueError in words.

It reads what decides the name and checks every length on the way, so that a server cannot see another name in the same
bytes. The record layer is RFC 8446 5.1, the hello 4.1.2, the name RFC 6066 3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["MAX_HELLO_BYTES", "ClientHello", "HelloParser", "SecondHello", "host_name"]

MAX_HELLO_BYTES = 70_000
"""With record headers. Chromium's largest is about 2 kB; a resumption with a big ticket stays under 20 kB."""

_CHANGE_CIPHER, _ALERT, _HANDSHAKE, _DATA, _CLIENT_HELLO = 20, 21, 22, 23, 1
_MAX_RECORD = 1 << 14
_MAX_RECORDS = 128
"""Of one hello, and between two: each takes time, however short it is."""
_RECORD_HEADER = 5
_SERVER_NAME, _EARLY_DATA, _ENCRYPTED_HELLO = 0, 42, 0xFE0D
_MAX_SESSION_ID = 32
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
_MAX_NAME = 253
_SHORTEST_HELLO, _LONGEST_TAKEN = 41, 131_396
"""What a server may take for one; the longest is OpenSSL's."""
_MAX_EARLY_DATA = 256 << 10
"""Servers take 16 kB at most, and throw no more than that away before a second hello."""


@dataclass(frozen=True, kw_only=True)
class ClientHello:
    name: str | None
    """Lower case, no dot at its end; None: it names no server."""
    has_encrypted_hello: bool
    """An extension `encrypted_client_hello`, real or dummy: they look alike from outside. `name` is the outer one."""
    has_early_data: bool
    """Data follow that the server may throw away, and then a second hello."""


class HelloParser:
    """Feed it what the client sends until it gives a hello."""

    def __init__(self) -> None:
        self._records = bytearray()
        self._message = bytearray()
        self._taken = self._fragments = 0

    def feed(self, data: bytes) -> ClientHello | None:
        """None: more is needed. Raises ValueError when these bytes are no ClientHello that a name can be read from."""
        self._taken += len(data)
        if self._taken > MAX_HELLO_BYTES:
            raise ValueError("the TLS hello is too long")
        self._records += data
        _check_beginning(self._records)
        while (fragment := self._next_fragment()) is not None:
            self._message += fragment
            hello = self._whole()
            if hello is not None:
                return hello
        return None

    @property
    def rest(self) -> bytes:
        """What came behind the hello's last record."""
        return bytes(self._records)

    def _next_fragment(self) -> bytes | None:
        records = self._records
        if len(records) < _RECORD_HEADER:
            return None
        length = int.from_bytes(records[3:5])
        if records[0] != _HANDSHAKE or records[1] != 3 or records[2] > 4:
            raise ValueError("another TLS record stands in the middle of the hello")
        if not 1 <= length <= _MAX_RECORD:
            raise ValueError("a TLS record has a wrong length")
        if len(records) < _RECORD_HEADER + length:
            return None
        self._fragments += 1
        if self._fragments > _MAX_RECORDS:
            raise ValueError("the TLS hello is in too many pieces")
        fragment = bytes(records[_RECORD_HEADER : _RECORD_HEADER + length])
        del records[: _RECORD_HEADER + length]
        return fragment

    def _whole(self) -> ClientHello | None:
        message = self._message
        if message[0] != _CLIENT_HELLO:
            raise ValueError("the first TLS message is no hello")
        if len(message) < 4:
            return None
        length = int.from_bytes(message[1:4])
        if length > MAX_HELLO_BYTES:
            raise ValueError("the TLS hello is too long")
        if len(message) < 4 + length:
            return None
        if len(message) > 4 + length:
            raise ValueError("another TLS message shares the hello's record")
        return _parse_hello(bytes(message[4:]))


class SecondHello:
    """Lets through what follows a hello, and looks at a second one: a server may ask for it (HelloRetryRequest).

    It has to name the same host. Everything from a session's first secret on is beyond reading.
    """

    def __init__(self, first: ClientHello) -> None:
        self._first = first
        self._records = bytearray()
        self._message = bytearray()
        self._early = _MAX_EARLY_DATA if first.has_early_data else 0
        self._fragments = 0
        self.is_over = False
        """No second hello can come: nothing needs to be fed any more, and nothing is held back."""

    def feed(self, data: bytes) -> bytes:
        """What of it may go on now. Raises ValueError when another host is named."""
        self._records += data
        passed = bytearray()
        while not self.is_over and (record := self._next_record()):
            self._look(record)
            passed += record
        if self.is_over:
            passed += self._records
            self._records.clear()
        return bytes(passed)

    def _next_record(self) -> bytes:
        records = self._records
        if records and records[0] not in (_CHANGE_CIPHER, _ALERT, _HANDSHAKE, _DATA):
            raise ValueError("what follows the TLS hello is no TLS")
        if len(records) < _RECORD_HEADER:
            return b""
        length = _RECORD_HEADER + int.from_bytes(records[3:5])
        if len(records) < length:
            return b""
        self._fragments += records[0] != _DATA  # which are counted by their bytes
        if self._fragments > _MAX_RECORDS:
            raise ValueError("too many TLS records come before the session")
        record = bytes(records[:length])
        del records[:length]
        return record

    def _look(self, record: bytes) -> None:
        if record[0] == _HANDSHAKE:
            self._message += record[_RECORD_HEADER:]
            self._compare()
        elif record[0] == _DATA:
            self._early -= len(record)
            self.is_over = self._early <= 0

    def _compare(self) -> None:
        """What is encrypted looks like a hello once in 30,000 times, but never comes to its end before the data do."""
        message = self._message
        if len(message) < 4:
            return
        length = int.from_bytes(message[1:4])
        if message[0] != _CLIENT_HELLO or not _SHORTEST_HELLO <= length <= _LONGEST_TAKEN:
            self.is_over = True
        elif len(message) > MAX_HELLO_BYTES:
            raise ValueError("the second TLS hello is too long")
        elif len(message) >= 4 + length:
            if _parse_hello(bytes(message[4 : 4 + length])).name != self._first.name:
                raise ValueError("the second TLS hello names another host")
            self.is_over = True


def host_name(text: str) -> str:
    """A host name as the judge wants it; ValueError for what is none, IP addresses in every spelling included."""
    name = text.lower().removesuffix(".")
    if not name.isascii() or len(name) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError("what stands for the host is no host name")
    if _ENDS_IN_NUMBER.fullmatch(name):
        raise ValueError("an address stands for the host name")
    return name


def _check_beginning(data: bytearray) -> None:
    """Refuse at the first byte that shows it, not when a whole record would be there."""
    if len(data) >= 3 and data[0] & 0x80 and data[2] == _CLIENT_HELLO:
        raise ValueError("an SSL 2 hello has no name")
    if data and data[0] != _HANDSHAKE and not data[0] & 0x80:
        raise ValueError("it does not begin as TLS")
    if len(data) >= 3 and data[0] & 0x80:
        raise ValueError("it does not begin as TLS")


def _parse_hello(body: bytes) -> ClientHello:
    reader = _Reader(body)
    if reader.number(2) >> 8 != 3:
        raise ValueError("the TLS hello is of an unknown version")
    reader.take(32)  # random
    if len(reader.block(1)) > _MAX_SESSION_ID:
        raise ValueError("the TLS hello has a wrong session id")
    suites = reader.block(2)
    if not suites or len(suites) % 2:
        raise ValueError("the TLS hello has a wrong list of ciphers")
    if not reader.block(1):
        raise ValueError("the TLS hello has a wrong list of compressions")
    extensions = _parse_extensions(reader.block(2)) if reader.left else {}
    if reader.left:
        raise ValueError("the TLS hello goes on behind its end")
    named = extensions.get(_SERVER_NAME)
    return ClientHello(
        name=None if named is None else _parse_server_name(named),
        has_encrypted_hello=_ENCRYPTED_HELLO in extensions,
        has_early_data=_EARLY_DATA in extensions,
    )


def _parse_extensions(body: bytes) -> dict[int, bytes]:
    reader = _Reader(body)
    found: dict[int, bytes] = {}
    while reader.left:
        kind = reader.number(2)
        if kind in found:
            raise ValueError("a TLS extension is there twice")
        found[kind] = reader.block(2)
    return found


def _parse_server_name(body: bytes) -> str:
    outer = _Reader(body)
    names = _Reader(outer.block(2))
    kind, name = names.number(1), names.block(2)
    if outer.left or names.left or kind != 0:
        raise ValueError("the TLS hello has more than one server name")
    try:
        return host_name(name.decode("ascii"))
    except UnicodeDecodeError:
        raise ValueError("the TLS hello has a server name that is not ASCII") from None


class _Reader:
    """Takes fields off the front; ValueError where fewer bytes are left than a length says."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError("the TLS hello has a length that leads out of it")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def block(self, size: int) -> bytes:
        """A field with its length, of `size` bytes, before it."""
        return self.take(self.number(size))
