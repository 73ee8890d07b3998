"""The requests on a plain HTTP/1 connection, read as they arrive: the host of each, and the bytes to pass on. Pure.

What is passed on is written anew from what was understood, in the one form that every server reads alike; what two
readers could understand in two ways is refused. So the server sees the requests, and the hosts, that were judged.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cpuos.node.network.peek.hello import host_name

__all__ = ["MAX_HEAD_BYTES", "Finals", "RequestHead", "RequestStream"]

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200

_LINE_END = b"\r\n"
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])")
_NAME, _VALUE = re.compile(_TOKEN), re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_AUTHORITY = re.compile(r"([^:@/?#\[\]]+)(?::([0-9]{1,5})?)?")
_ABSOLUTE = re.compile(r"http://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: |\r|$)")
_MAX_LINE = 8 << 10
_MAX_BLANK_LINES = 4
# Of one hop only, or the way to speech that cannot be read here (h2c, TLS).
_UPGRADES = (b"upgrade", b"http2-settings")
# A proxy behind may take away what `Connection` names: these decide who is asked, and how long the request is.
_NEVER_OF_ONE_HOP = {b"host", b"content-length", b"transfer-encoding"}


@dataclass(frozen=True, kw_only=True)
class RequestHead:
    host: str
    """A host name, or an IPv4 address as it is usually written."""
    address: ipaddress.IPv4Address | None
    """Set where the host is one: then there is no name."""
    asks_for_websocket: bool
    """The server may agree to stop speaking HTTP. Only a first request can ask; of later ones the wish is removed."""
    wire: bytes
    """What to pass on."""


class _Header(NamedTuple):
    name: bytes
    """In lower case."""
    value: bytes
    written: bytes
    """The name as the client wrote it."""


class RequestStream:
    """Feed it what the client sends; it gives heads, and pieces of bodies as bytes, in the order of the wire."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._buffer = bytearray()
        self._read = self._read_head
        self._body_left = 0
        self._blank_lines = 0
        self._is_first = True
        self._searched = 0

    def feed(self, data: bytes) -> Iterator[RequestHead | bytes]:
        """Raises ValueError, in words, at what is no request, or not clearly one. Must be run to its end."""
        self._buffer += data
        while (found := self._read()) is not None:
            if found != b"":
                yield found

    def take_rest(self) -> bytes:
        """What came behind the last head, when the connection stops being HTTP."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    # Each step gives what it has read (b"": nothing to pass on), or None when it needs more.

    def _read_head(self) -> RequestHead | bytes | None:
        buffer = self._buffer
        while buffer.startswith(_LINE_END):  # RFC 9112 2.2: some send one behind a body
            del buffer[:2]
            self._blank_lines += 1
            if self._blank_lines > _MAX_BLANK_LINES:
                raise ValueError("empty lines stand for an HTTP request")
        end = buffer.find(b"\r\n\r\n", max(0, self._searched - 3))
        self._searched = len(buffer)
        if (len(buffer) if end < 0 else end) > MAX_HEAD_BYTES:
            raise ValueError("the head of an HTTP request is too long")
        if end < 0:
            _check_so_far(buffer)
            return None
        lines = bytes(buffer[:end]).split(_LINE_END)
        del buffer[: end + 4]
        self._searched = self._blank_lines = 0
        return self._take_head(lines)

    def _take_head(self, lines: list[bytes]) -> RequestHead:
        line = _REQUEST_LINE.fullmatch(lines[0])
        if line is None:
            raise ValueError("an HTTP request line is not one of HTTP/1")
        if len(lines) > MAX_HEADERS:
            raise ValueError("an HTTP request has too many headers")
        headers = [_header(text) for text in lines[1:]]
        method, target, minor = line[1], line[2], line[3]
        self._start_body(headers, has_chunks=minor == b"1")
        host, address = _read_host(method, target, headers, port=self._port)
        asks = self._is_first and [value.lower() for value in _values(headers, b"upgrade")] == [b"websocket"]
        self._is_first = False
        kept = [header for header in headers if asks or header.name not in _UPGRADES]
        options = _connection_options(headers, asks=asks)
        written = [line[0], *(header.written + b": " + header.value for header in kept if header.name != b"connection")]
        written += [b"Connection: " + options, b"", b""] if options else [b"", b""]
        return RequestHead(host=host, address=address, asks_for_websocket=asks, wire=_LINE_END.join(written))

    def _start_body(self, headers: list[_Header], *, has_chunks: bool) -> None:
        lengths = _values(headers, b"content-length")
        codings = [value.lower() for value in _values(headers, b"transfer-encoding")]
        if len(lengths) + len(codings) > 1:
            raise ValueError("an HTTP request says more than once how long it is")
        if codings:
            if codings != [b"chunked"] or not has_chunks:
                raise ValueError("an HTTP request has an unknown transfer coding")
            self._read = self._read_chunk_size
        elif lengths:
            if not _LENGTH.fullmatch(lengths[0]):
                raise ValueError("an HTTP request has a wrong length")
            self._body_left = int(lengths[0])
            self._read = self._read_body if self._body_left else self._read_head

    def _read_body(self) -> bytes | None:
        piece = self._take(self._body_left)
        if piece is None:
            return None
        self._body_left -= len(piece)
        if not self._body_left:
            self._read = self._read_head
        return piece

    def _read_chunk_size(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        match = _CHUNK.fullmatch(line)
        if match is None:
            raise ValueError("an HTTP request has a wrong chunk")
        self._body_left = int(match[1], 16)
        self._read = self._read_chunk if self._body_left else self._read_trailer
        return b"%x\r\n" % self._body_left

    def _read_chunk(self) -> bytes | None:
        piece = self._take(self._body_left)
        if piece is None:
            return None
        self._body_left -= len(piece)
        if not self._body_left:
            self._read = self._read_chunk_end
        return piece

    def _read_chunk_end(self) -> bytes | None:
        if len(self._buffer) < 2:
            return None
        if not self._buffer.startswith(_LINE_END):
            raise ValueError("an HTTP request has a wrong chunk")
        del self._buffer[:2]
        self._read = self._read_chunk_size
        return _LINE_END

    def _read_trailer(self) -> bytes | None:
        """Trailers are dropped: a server may take one for a header."""
        line = self._line()
        if line is None:
            return None
        if line:
            _header(line)
            self._blank_lines += 1
            if self._blank_lines > MAX_HEADERS:
                raise ValueError("an HTTP request has too many trailers")
            return b""
        self._blank_lines = 0
        self._read = self._read_head
        return _LINE_END

    def _take(self, count: int) -> bytes | None:
        if not self._buffer:
            return None
        piece = bytes(self._buffer[:count])
        del self._buffer[:count]
        return piece

    def _line(self) -> bytes | None:
        end = self._buffer.find(_LINE_END, 0, _MAX_LINE)
        if end < 0:
            if len(self._buffer) >= _MAX_LINE:
                raise ValueError("a line in an HTTP request is too long")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


class Finals:
    """Reads answers up to the first final one, and says its status: 101 ends HTTP on the connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> int | None:
        """None: more is needed. Raises ValueError for what is no HTTP/1 answer."""
        self._buffer += data
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise ValueError("the head of an HTTP answer is too long")
                return None
            match = _STATUS.match(self._buffer)
            if match is None:
                raise ValueError("an HTTP answer is not one of HTTP/1")
            status = int(match[1])
            if status == 101 or status >= 200:
                return status
            del self._buffer[: end + 4]


def _check_so_far(buffer: bytearray) -> None:
    """Refuse what can no longer become a request line, without waiting for the head's end."""
    if buffer == b"\r":  # half an empty line
        return
    line, ended, _ = bytes(buffer[:_MAX_LINE]).partition(b"\n")
    if ended and not _REQUEST_LINE.fullmatch(line.removesuffix(b"\r")):
        raise ValueError("an HTTP request line is not one of HTTP/1")
    if ended and not line.endswith(b"\r"):
        raise ValueError("a line in an HTTP request has no proper end")
    if line and not re.fullmatch(_TOKEN + rb"(?: [\x21-\x7e\x80-\xff]*(?: [HTP/1.0]*\r?)?)?", line):
        raise ValueError("it does not begin as HTTP")


def _header(line: bytes) -> _Header:
    """Folded lines, which begin with a space, are none."""
    name, colon, value = line.partition(b":")
    value = value.strip(b" \t")
    if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise ValueError("an HTTP request has a header that is none")
    return _Header(name.lower(), value, name)


def _values(headers: list[_Header], name: bytes) -> list[bytes]:
    return [header.value for header in headers if header.name == name]


def _read_host(
    method: bytes, target: bytes, headers: list[_Header], *, port: int
) -> tuple[str, ipaddress.IPv4Address | None]:
    hosts = _values(headers, b"host")
    if len(hosts) != 1:
        raise ValueError(f"an HTTP request has {'more than one' if hosts else 'no'} Host")
    authority = _authority(hosts[0].decode("latin-1"), port)
    text = target.decode("latin-1")
    if method == b"CONNECT":
        raise ValueError("an HTTP request asks for a tunnel")
    absolute = _ABSOLUTE.fullmatch(text)
    if absolute:
        if _authority(absolute[1], port) != authority:
            raise ValueError("an HTTP request names two hosts")
    elif not text.startswith("/") and (method, text) != (b"OPTIONS", "*"):
        raise ValueError("an HTTP request is for something else than a path")
    return authority


def _authority(text: str, port: int) -> tuple[str, ipaddress.IPv4Address | None]:
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        raise ValueError("an HTTP request has a wrong Host")
    if match[2] is not None and int(match[2]) != port:
        raise ValueError("an HTTP request has a Host with another port")
    try:
        address = ipaddress.IPv4Address(match[1])
    except ValueError:
        return host_name(match[1]), None
    return str(address), address


def _connection_options(headers: list[_Header], *, asks: bool) -> bytes:
    options = [option.strip() for value in _values(headers, b"connection") for option in value.split(b",")]
    if any(option.lower() in _NEVER_OF_ONE_HOP for option in options):
        raise ValueError("an HTTP request has a Connection that names what it must not")
    return b", ".join(option for option in options if option and (asks or option.lower() not in _UPGRADES))
