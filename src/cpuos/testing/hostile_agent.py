"""An agent that breaks the guest contract on demand: the host must neither crash, hang, bloat nor believe it.

    async with HostileAgent("a" * 20, socket_path=path) as agent:
        agent.misbehave(Misdeed.HUGE_HEAD)                   # at every call
        agent.misbehave(Misdeed.BAD_FRAME, at="/v1/commands")  # only at paths that start so

Without a misdeed it answers identity, hello and an empty list of commands correctly, whatever key is sent.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from cpuos.types.frames import MAX_PAYLOAD, FrameKind, encode_frame

__all__ = ["HostileAgent", "Misdeed"]


class Misdeed(StrEnum):
    # before or instead of an answer
    NEVER_ANSWER = "never_answer"  # takes the request, says nothing, keeps the connection
    NEVER_ACCEPT = "never_accept"  # connections wait in the backlog
    CLOSE = "close"  # closes after the request
    RESET = "reset"  # aborts the connection
    GARBAGE = "garbage"  # bytes that are not HTTP
    # heads
    HUGE_HEAD = "huge_head"  # headers without end
    LONG_LINE = "long_line"  # one header line without end
    ENDLESS_1XX = "endless_1xx"
    SLOW_HEAD = "slow_head"  # one byte every 50 ms
    REDIRECT = "redirect"
    COOKIE_AND_GZIP = "cookie_and_gzip"  # Content-Encoding: gzip and a body that says 1 GiB
    BAD_STATUS = "bad_status"  # status line 999
    NEGATIVE_LENGTH = "negative_length"
    TWO_LENGTHS = "two_lengths"
    LENGTH_AND_CHUNKED = "length_and_chunked"
    # bodies
    SHORT_BODY = "short_body"  # announces more than it sends
    LONG_BODY = "long_body"  # sends more than it announces
    ENDLESS_BODY = "endless_body"  # chunked, without end
    BAD_CHUNK = "bad_chunk"
    SLOW_BODY = "slow_body"
    DEEP_JSON = "deep_json"  # 100,000 brackets
    HUGE_JSON = "huge_json"  # 64 MiB of one text
    NOT_JSON = "not_json"
    WRONG_TYPES = "wrong_types"  # right names, wrong kinds of value
    NAN_JSON = "nan_json"
    # identity
    WRONG_SANDBOX = "wrong_sandbox"
    WRONG_GENERATION = "wrong_generation"
    REFUSE_IDENTITY = "refuse_identity"
    # refusals
    REFUSE_OTHERWISE = "refuse_otherwise"  # with a code of the contract that belongs to other calls: `refuses_as`
    # freezes
    NO_SUCH_CALL = "no_such_call"  # as an agent of an earlier release answers
    MANY_LISTENERS = "many_listeners"  # more than a sandbox may tell
    LYING_LISTENERS = "lying_listeners"  # ports and addresses that cannot be
    FROZEN_FOR_EVER = "frozen_for_ever"  # says that it is frozen, whatever thaws it
    # streams (after 101)
    BAD_FRAME = "bad_frame"  # an unknown kind
    HUGE_FRAME = "huge_frame"  # a length over the contract
    CUT_FRAME = "cut_frame"  # closes inside a payload
    WRONG_OFFSET = "wrong_offset"  # output whose offset jumps
    BACK_OFFSET = "back_offset"  # output whose offset goes back
    FLOOD = "flood"  # output without end, ACKs ignored
    SILENT_STREAM = "silent_stream"  # STARTED, then nothing, not even keep-alives
    BAD_ENDED = "bad_ended"  # ENDED with a status that does not exist
    DEEP_ENDED = "deep_ended"
    LYING_ENDED = "lying_ended"  # ENDED counts bytes that were never sent
    NO_STARTED = "no_started"  # output before STARTED
    HOST_FRAMES = "host_frames"  # sends frames that only a host may send
    AFTER_ENDED = "after_ended"  # goes on after ENDED


class HostileAgent:
    """Listens on a unix socket, or on a TCP port of 127.0.0.1 when no path is given."""

    def __init__(self, sandbox_id: str, *, socket_path: Path | None = None) -> None:
        self.sandbox_id = sandbox_id
        self.requests: list[str] = []
        """Request lines that arrived, for tests that count calls."""
        self.sent_bytes = 0
        self.refuses_as = "frozen"
        self.is_frozen = False
        """It says so."""
        self._socket_path = socket_path
        self._misdeeds: list[tuple[str, Misdeed]] = []
        self._generation = 1
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int] | str:
        assert self._server is not None
        if self._socket_path is not None:
            return str(self._socket_path)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    def misbehave(self, misdeed: Misdeed, *, at: str = "/") -> None:
        """From now on do this at paths that start with `at`; the newest rule that fits wins."""
        self._misdeeds.insert(0, (at, misdeed))

    def behave(self) -> None:
        self._misdeeds.clear()

    async def __aenter__(self) -> Self:
        if self._socket_path is not None:
            self._server = await asyncio.start_unix_server(self._connected, path=str(self._socket_path))
        else:
            self._server = await asyncio.start_server(self._connected, host="127.0.0.1", port=0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve(_Wire(self, reader, writer)):
                pass
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, wire: _Wire) -> bool:
        if self._misdeed("") is Misdeed.NEVER_ACCEPT:
            await asyncio.Event().wait()
        line, body = await wire.read_request()
        self.requests.append(line)
        method, target, _ = line.split(" ", 2)
        path = target.partition("?")[0]
        misdeed = self._misdeed(path)
        streams = method == "POST" and (path == "/v1/commands" or path.endswith("/attach"))
        if path == "/v1/identity":
            self._generation = _generation_of(body)
        if misdeed is None:
            await self._answer_well(wire, path)
            return True
        if misdeed in _STREAM_MISDEEDS and streams:
            await wire.send(_UPGRADED)
            await _STREAM_MISDEEDS[misdeed](wire)
            return False
        if misdeed in _MISDEEDS:
            await _MISDEEDS[misdeed](wire)
            return False
        await self._answer_wrongly(wire, misdeed)
        return True

    def _misdeed(self, path: str) -> Misdeed | None:
        for prefix, misdeed in self._misdeeds:
            if path.startswith(prefix) or (path == "" and misdeed is Misdeed.NEVER_ACCEPT):
                return misdeed
        return None

    def hello(self) -> dict[str, Any]:
        return {
            "contract": 1,
            "agent": "hostile",
            "sandbox": self.sandbox_id,
            "generation": self._generation,
            "boot_s": 0.1,
            "commands": 0,
            "frozen": "f" * 32 if self.is_frozen else None,
        }

    async def _answer_well(self, wire: _Wire, path: str) -> None:
        if path in ("/v1/identity", "/v1/hello"):
            await wire.answer(self.hello())
        elif path == "/v1/commands":
            await wire.answer({"commands": []})
        elif path == "/v1/freeze":
            await wire.answer({"processes": 1, "listeners": [], "commands": []})
        elif path == "/v1/thaw":
            await wire.answer({"continued": 1})
        else:
            await wire.answer({"code": "not_found", "message": "hostile", "errno": None}, status=404)

    async def _answer_wrongly(self, wire: _Wire, misdeed: Misdeed) -> None:
        if misdeed is Misdeed.WRONG_SANDBOX:
            await wire.answer(self.hello() | {"sandbox": "z" * 20})
        elif misdeed is Misdeed.WRONG_GENERATION:
            await wire.answer(self.hello() | {"generation": self._generation + 7})
        elif misdeed is Misdeed.NO_SUCH_CALL:
            await wire.answer({"code": "not_found", "message": "no such call", "errno": 0}, status=404)
        elif misdeed is Misdeed.MANY_LISTENERS:
            listeners = [{"port": 1 + number % 65535, "address": "127.0.0.1"} for number in range(20_000)]
            await wire.answer({"processes": 1, "listeners": listeners, "commands": []})
        elif misdeed is Misdeed.LYING_LISTENERS:
            await wire.answer({"processes": -1, "listeners": [{"port": 0, "address": "<b>"}], "commands": ["../x"]})
        elif misdeed is Misdeed.FROZEN_FOR_EVER:
            await wire.answer(self.hello() | {"frozen": "f" * 32, "continued": 1 << 70})
        elif misdeed is Misdeed.REFUSE_OTHERWISE:
            await wire.answer({"code": self.refuses_as, "message": "wait for it", "errno": 0}, status=409)
        elif misdeed is Misdeed.REFUSE_IDENTITY:
            await wire.answer({"code": "identity_refused", "message": "no", "errno": None}, status=401)
        else:
            await self._answer_well(wire, "/v1/hello")


class _Wire:
    """One connection of the hostile agent."""

    def __init__(self, agent: HostileAgent, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._agent = agent
        self._reader = reader
        self._writer = writer

    async def read_request(self) -> tuple[str, bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = 0
        for line in head.split("\r\n")[1:]:
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-length":
                length = int(value)
        return head.split("\r\n", 1)[0], await self._reader.readexactly(length)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        self._agent.sent_bytes += len(data)

    async def answer(self, content: Any, *, status: int = 200) -> None:
        payload = json.dumps(content).encode()
        await self.send(_head(status, f"Content-Length: {len(payload)}") + payload)

    async def end(self) -> None:
        self._writer.close()

    async def abort(self) -> None:
        self._writer.transport.abort()

    async def wait(self) -> None:
        """Hold the connection until the host closes it."""
        while await self._reader.read(64 << 10):
            pass


_UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: cpuos-frames/1\r\n\r\n"
_STARTED = encode_frame(FrameKind.STARTED, b'{"pid": 7}')


def _head(status: int, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Answer", "Content-Type: application/json", *lines, "", ""]).encode()


def _ended(**changes: Any) -> bytes:
    fields = {
        "status": "exited",
        "exit_code": 0,
        "signal": None,
        "limit": None,
        "reason": "",
        "duration_s": 0.1,
        "stdout_bytes": 0,
        "stderr_bytes": 0,
        "output_path": None,
    }
    return encode_frame(FrameKind.ENDED, json.dumps(fields | changes).encode())


def _generation_of(body: bytes) -> int:
    return int(json.loads(base64.b64decode(json.loads(body)["statement"]))["generation"])


def _sends(*pieces: bytes, hold: bool = False) -> Callable[[_Wire], Awaitable[None]]:
    """Send these; then hold the connection, or close it."""

    async def misdeed(wire: _Wire) -> None:
        for piece in pieces:
            await wire.send(piece)
        await (wire.wait() if hold else wire.end())

    return misdeed


def _endless(first: bytes, then: bytes, *, pause_s: float = 0.0) -> Callable[[_Wire], Awaitable[None]]:
    async def misdeed(wire: _Wire) -> None:
        await wire.send(first)
        while True:
            await wire.send(then)
            await asyncio.sleep(pause_s)

    return misdeed


def _slowly(data: bytes, *, first: bytes = b"") -> Callable[[_Wire], Awaitable[None]]:
    async def misdeed(wire: _Wire) -> None:
        await wire.send(first)
        for byte in data:
            await wire.send(bytes([byte]))
            await asyncio.sleep(0.05)

    return misdeed


async def _huge_json(wire: _Wire) -> None:
    await wire.send(_head(200, f"Content-Length: {(64 << 20) + 4}") + b'["')
    for _ in range(64):
        await wire.send(b"x" * (1 << 20))
    await wire.send(b'"]')


async def _flood(wire: _Wire) -> None:
    await wire.send(_STARTED)
    offset = 0
    while True:
        await wire.send(encode_frame(FrameKind.STDOUT, b"y" * MAX_PAYLOAD, offset=offset))
        offset += MAX_PAYLOAD


_DEEP = b"[" * 100_000 + b"]" * 100_000

_MISDEEDS: dict[Misdeed, Callable[[_Wire], Awaitable[None]]] = {
    Misdeed.NEVER_ANSWER: _sends(hold=True),
    Misdeed.CLOSE: _Wire.end,
    Misdeed.RESET: _Wire.abort,
    Misdeed.GARBAGE: _sends(b"\x00\xff\x16\x03\x01 not http\r\n\r\n" * 10),
    Misdeed.HUGE_HEAD: _endless(b"HTTP/1.1 200 OK\r\n", b"X-Filler: 0123456789\r\n" * 100),
    Misdeed.LONG_LINE: _endless(b"HTTP/1.1 200 OK\r\nX-Long: ", b"a" * 4096),
    Misdeed.ENDLESS_1XX: _endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    Misdeed.SLOW_HEAD: _slowly(_head(200, "Content-Length: 2", *(f"X-{n}: slow" for n in range(200))) + b"{}"),
    Misdeed.REDIRECT: _sends(_head(302, "Location: http://169.254.169.254/latest/", "Content-Length: 2") + b"{}"),
    Misdeed.COOKIE_AND_GZIP: _sends(
        _head(200, "Set-Cookie: a=b", "Content-Encoding: gzip", "Content-Length: 20") + b"\x1f\x8b" + b"\x00" * 18
    ),
    Misdeed.BAD_STATUS: _sends(b"HTTP/1.1 999 What\r\nContent-Length: 2\r\n\r\n{}"),
    Misdeed.NEGATIVE_LENGTH: _sends(_head(200, "Content-Length: -5") + b"{}"),
    Misdeed.TWO_LENGTHS: _sends(_head(200, "Content-Length: 2", "Content-Length: 20") + b"{}"),
    Misdeed.LENGTH_AND_CHUNKED: _sends(
        _head(200, "Content-Length: 2", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
    ),
    Misdeed.SHORT_BODY: _sends(_head(200, "Content-Length: 5000") + b'{"contract": 1'),
    Misdeed.LONG_BODY: _sends(_head(200, "Content-Length: 2") + b"{}" + b"HTTP/1.1 200 OK\r\n" * 1000),
    Misdeed.ENDLESS_BODY: _endless(_head(200, "Transfer-Encoding: chunked"), b"1000\r\n" + b" " * 4096 + b"\r\n"),
    Misdeed.BAD_CHUNK: _sends(_head(200, "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n"),
    Misdeed.SLOW_BODY: _slowly(b"{" + b" " * 5000 + b"}", first=_head(200, "Content-Length: 5002")),
    Misdeed.DEEP_JSON: _sends(_head(200, f"Content-Length: {len(_DEEP)}") + _DEEP),
    Misdeed.HUGE_JSON: _huge_json,
    Misdeed.NOT_JSON: _sends(_head(200, "Content-Length: 9") + b"not json!"),
    Misdeed.WRONG_TYPES: _sends(
        _head(200, "Content-Length: 98")
        + b'{"contract":[1],"agent":{},"sandbox":7,"generation":"many","boot_s":null,"commands":{"entries":7}}'
    ),
    Misdeed.NAN_JSON: _sends(_head(200, "Content-Length: 32") + b'{"boot_s": NaN, "contract": 1e9}'),
}

_STREAM_MISDEEDS: dict[Misdeed, Callable[[_Wire], Awaitable[None]]] = {
    Misdeed.BAD_FRAME: _sends(_STARTED, struct.pack(">BBHIQ", 99, 0, 0, 4, 0) + b"abcd", hold=True),
    Misdeed.HUGE_FRAME: _sends(_STARTED, struct.pack(">BBHIQ", FrameKind.STDOUT, 0, 0, 0xFFFFFFFF, 0), hold=True),
    Misdeed.CUT_FRAME: _sends(_STARTED, encode_frame(FrameKind.STDOUT, b"z" * 1000)[:500]),
    Misdeed.WRONG_OFFSET: _sends(_STARTED, encode_frame(FrameKind.STDOUT, b"jump", offset=1 << 40), hold=True),
    Misdeed.BACK_OFFSET: _sends(
        _STARTED,
        encode_frame(FrameKind.STDOUT, b"forward", offset=0),
        encode_frame(FrameKind.STDOUT, b"back", offset=0),
        hold=True,
    ),
    Misdeed.FLOOD: _flood,
    Misdeed.SILENT_STREAM: _sends(_STARTED, hold=True),
    Misdeed.BAD_ENDED: _sends(_STARTED, _ended(status="triumphant"), hold=True),
    Misdeed.DEEP_ENDED: _sends(_STARTED, encode_frame(FrameKind.ENDED, _DEEP), hold=True),
    Misdeed.LYING_ENDED: _sends(_STARTED, _ended(stdout_bytes=1 << 50), hold=True),
    Misdeed.NO_STARTED: _sends(encode_frame(FrameKind.STDOUT, b"early"), _ended(stdout_bytes=5)),
    Misdeed.HOST_FRAMES: _sends(_STARTED, encode_frame(FrameKind.KILL, b'{"signal": 9}'), hold=True),
    Misdeed.AFTER_ENDED: _sends(_STARTED, _ended(), encode_frame(FrameKind.STDOUT, b"late") * 1000, hold=True),
}
