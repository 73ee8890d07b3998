"""HTTP/1.1 answers of an agent, sans-I/O and strict: what is not plainly right is `AgentFailure`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cpuos.errors import AgentFailure

__all__ = ["MAX_HEAD_BYTES", "AnswerHead", "AnswerParser", "ChunkedDecoder", "agent_invalid"]

MAX_HEAD_BYTES = 16 << 10
MAX_INTERIM_ANSWERS = 8
MAX_CHUNK_LINE = 64
MAX_CHUNK = 1 << 30
MAX_LENGTH = 1 << 50

_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9])(?: [\x20-\x7e]*)?")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}):[ \t]*([\x20-\x7e\t]*?)[ \t]*")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")


def agent_invalid(why: str) -> AgentFailure:
    """The one error for an agent outside its contract."""
    return AgentFailure("cannot use the answer of the sandbox's agent", why, code="agent_invalid")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHead:
    """Status line and headers; the names are in lower case."""

    status: int
    headers: dict[bytes, bytes]
    length: int | None
    """None: chunked."""
    reusable: bool
    """The connection bears another request after the body."""

    @property
    def upgraded(self) -> bool:
        return self.status == 101


class AnswerParser:
    """Finds the head of one answer in what has come so far; counts interim answers."""

    def __init__(self) -> None:
        self._interim = 0

    def parse(self, data: bytes | bytearray, start: int, end: int) -> tuple[AnswerHead | None, int]:
        """The head within data[start:end] and where the rest begins; None while it is not whole."""
        while True:
            stop = data.find(b"\r\n\r\n", start, end)
            if stop < 0:
                if end - start > MAX_HEAD_BYTES:
                    raise agent_invalid(f"its answer's head is over {MAX_HEAD_BYTES} bytes")
                return None, start
            if stop - start > MAX_HEAD_BYTES:
                raise agent_invalid(f"its answer's head is over {MAX_HEAD_BYTES} bytes")
            head = _read_head(bytes(data[start:stop]))
            start = stop + 4
            if head.status >= 200 or head.upgraded:
                return head, start
            self._interim += 1
            if self._interim > MAX_INTERIM_ANSWERS:
                raise agent_invalid(f"it sent over {MAX_INTERIM_ANSWERS} interim answers")


def _read_head(head: bytes) -> AnswerHead:
    lines = head.split(b"\r\n")
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise agent_invalid("its status line is not HTTP/1.1")
    status = int(match[1])
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        field = _HEADER.fullmatch(line)
        if field is None:
            raise agent_invalid("a header line is malformed")
        name = field[1].lower()
        if name in headers:
            raise agent_invalid(f"header {name.decode()} comes twice")
        headers[name] = field[2]
    return AnswerHead(
        status=status,
        headers=headers,
        length=_body_length(status, headers),
        reusable=headers.get(b"connection", b"").lower() != b"close",
    )


def _body_length(status: int, headers: dict[bytes, bytes]) -> int | None:
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise agent_invalid("its body is compressed")
    coding = headers.get(b"transfer-encoding")
    length = headers.get(b"content-length")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None:
            raise agent_invalid("its body has no single plain length")
        return None
    if status < 200 or status in (204, 304):
        return 0
    if length is None:
        raise agent_invalid("its answer names no length")
    if not length.isdigit() or len(length) > 16 or int(length) > MAX_LENGTH:
        raise agent_invalid("its content length is not a number")
    return int(length)


class ChunkedDecoder:
    """Chunked coding without extensions and trailers. `done` is set behind the last chunk."""

    def __init__(self) -> None:
        self.done = False
        self._left = 0
        """Bytes still to come of the chunk at hand."""
        self._line = b""
        """Start of a size line, or of the line end behind a chunk, that is not whole yet."""
        self._first = True

    def feed(self, data: bytes) -> list[bytes]:
        """The body's pieces within `data`. Bytes behind the last chunk are out of contract."""
        pieces = []
        view = memoryview(data)
        position = 0
        while position < len(data):
            if self.done:
                raise agent_invalid("bytes follow its last chunk")
            if self._left:
                piece = bytes(view[position : position + self._left])
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
            else:
                position = self._read_line(data, position)
        return pieces

    def _read_line(self, data: bytes, position: int) -> int:
        held = len(self._line)
        line = self._line + data[position : position + MAX_CHUNK_LINE]
        lead = 0 if self._first else 2  # the line end behind the chunk before
        if not b"\r\n".startswith(line[:lead][:2]):
            raise agent_invalid("a chunk does not end where its size says")
        match = _CHUNK_LINE.match(line, lead)
        if match is None:
            if len(line) >= MAX_CHUNK_LINE or (b"\n" in line[lead:]):
                raise agent_invalid("a chunk's size line is malformed")
            self._line = line
            return position + len(line) - held
        size = int(match[1], 16)
        if size > MAX_CHUNK:
            raise agent_invalid(f"a chunk is over {MAX_CHUNK} bytes")
        stop = match.end()
        if size == 0:
            tail = line[stop : stop + 2]
            if not b"\r\n".startswith(tail):
                raise agent_invalid("its body has trailers")
            if len(tail) < 2:
                self._line = line
                return position + len(line) - held
            stop += 2
            self.done = True
        self._left = size
        self._line = b""
        self._first = False
        return position + stop - held
