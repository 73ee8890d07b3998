"""HTTP/1.1 as bytes, without any I/O: heads of requests, and answers with their bodies as they come.

Only what a client of one known server needs: no redirects, cookies, compression or pipelining. What is not plain
HTTP/1.1 is refused, and with it the connection.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["AnswerParser", "WireError", "encode_head"]

MAX_HEAD = 64 << 10
MAX_INFORMATIONAL = 8
_LINE_END = b"\r\n"
_HEX_DIGITS = b"0123456789abcdefABCDEF"


class WireError(ValueError):
    """The bytes are no answer of HTTP/1.1, or end before their end."""


def encode_head(method: str, target: str, *, host: str, headers: Mapping[str, str], body: int | None) -> bytes:
    """The head of a request. `body` is its length; None: in chunks."""
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is None:
        lines.append("transfer-encoding: chunked")
    elif "content-length" not in headers and (body or method not in ("GET", "DELETE", "HEAD")):
        lines.append(f"content-length: {body}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or not text.isascii():
        raise WireError("a header has a character that it cannot have")
    return text.encode("ascii") + b"\r\n\r\n"


class AnswerParser:
    """Feed what arrives, take body bytes out. `status` is 0 until the head is whole; `done` ends the answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.keep_alive = True
        self.left = 0
        """Bytes of the body, or of its current chunk, still to come."""
        self.chunked = False
        self._pending = b""
        self._informational = 0
        self._until_close = False
        self._chunk_ended = False
        self._in_trailers = False

    @property
    def plain(self) -> bool:
        """The next `left` bytes of the connection are body and nothing else."""
        return bool(self.status) and not self.chunked and not self._until_close and not self.done

    def skip(self, size: int) -> None:
        """Body bytes that the caller took off a plain connection by itself."""
        self.left -= size
        self.done = self.left == 0

    def feed(self, data: bytes) -> list[bytes]:
        """Body bytes in `data`, in order."""
        if not self.status:
            data = self._feed_head(data)
            if not self.status:
                return []
        if self.done:
            if data:
                # Something that was never asked for: what follows on this connection means nothing.
                self.keep_alive = False
            return []
        if self.chunked:
            return self._feed_chunks(data)
        if self._until_close:
            return [data] if data else []
        if len(data) > self.left:
            self.keep_alive = False
            data = data[: self.left]
        self.skip(len(data))
        return [data] if data else []

    def feed_end(self) -> None:
        """The other side closed. Only a body without a length may end so."""
        if self._until_close and self.status:
            self.done = True
            self.keep_alive = False
        if not self.done:
            raise WireError("the connection was closed before the answer's end" if self.status else "no answer came")

    def _feed_head(self, data: bytes) -> bytes:
        data = self._pending + data
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head, data = data[:end], data[end + 4 :]
            self._parse_head(head)
            if self.status >= 200:
                self._pending = b""
                return data
            self._informational += 1
            if self._informational > MAX_INFORMATIONAL:
                raise WireError("too many informational answers")
            self.status, self.headers = 0, {}
        if len(data) > MAX_HEAD:
            raise WireError("the answer's head is too long")
        self._pending = data
        return b""

    def _parse_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        status = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not status.isdecimal() or not 100 <= int(status) <= 599:
            raise WireError(f"the answer begins with {lines[0][:40]!r}")
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise WireError(f"the answer's head has the line {line[:40]!r}")
            self.headers[name.lower()] = value.strip()
        self.status = int(status)
        if self.status < 200:
            return
        self.keep_alive = version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"
        self._find_length()

    def _find_length(self) -> None:
        encoding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        if self.status in (204, 304):
            self.done = True
        elif encoding is not None:
            if encoding.lower() != "chunked":
                raise WireError(f"the answer has the transfer encoding {encoding[:40]!r}")
            self.chunked = True
        elif length is not None:
            if not length.isdecimal():
                raise WireError(f"the answer has the length {length[:40]!r}")
            self.left = int(length)
            self.done = self.left == 0
        else:
            self._until_close = True

    def _feed_chunks(self, data: bytes) -> list[bytes]:
        if self._pending:
            data, self._pending = self._pending + data, b""
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            if self.left:
                piece = data[at : at + self.left] if at or len(data) > self.left else data
                pieces.append(piece)
                at += len(piece)
                self.left -= len(piece)
                self._chunk_ended = not self.left
                continue
            end = data.find(_LINE_END, at)
            if end < 0:
                self._pending = data[at:]
                if len(self._pending) > MAX_HEAD:
                    raise WireError("a line between chunks is too long")
                return pieces
            self._take_line(data[at:end])
            at = end + 2
        if at < len(data):
            self.keep_alive = False
        return pieces

    def _take_line(self, line: bytes) -> None:
        if self._chunk_ended:
            if line:
                raise WireError("a chunk is longer than it said")
            self._chunk_ended = False
        elif self._in_trailers:
            self.done = not line
        else:
            size = line.partition(b";")[0].strip()
            # int() itself takes more: signs, underscores, "0x".
            if not size or size.strip(_HEX_DIGITS) or len(size) > 16:
                raise WireError(f"a chunk has the size {size[:20]!r}")
            self.left = int(size, 16)
            self._in_trailers = not self.left
