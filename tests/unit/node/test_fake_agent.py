"""The fake agent keeps the guest contract, so that what passes on it means something."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from cpuos.node.identity import NodeIdentity, load_identity
from cpuos.testing.fake_agent import FakeAgent
from cpuos.testing.waiting import until
from cpuos.types.frames import Frame, FrameDecoder, FrameKind, encode_frame

A, COMMAND = "a" * 20, "c" * 16
KEY = b"k" * 32
FREEZE = "f" * 32


class Guest:
    """A raw client of one fake agent."""

    def __init__(self, path: Path, identity: NodeIdentity) -> None:
        self._path = path
        self.identity = identity

    async def call(self, method: str, target: str, body: bytes = b"", *, key: bytes = KEY) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        head = f"{method} {target} HTTP/1.1\r\nAuthorization: Bearer {key.hex()}\r\nConnection: close\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        head_bytes, _, payload = answer.partition(b"\r\n\r\n")
        return int(head_bytes.split()[1]), payload

    async def identify(self, generation: int = 1, *, sandbox: str = A, key: bytes = KEY, **words: Any) -> int:
        signed = self.identity.sign_statement(sandbox, generation, session_key=key, hostname="box", **words)
        body = {name: base64.b64encode(getattr(signed, name)).decode() for name in ("statement", "signature")}
        return (await self.call("POST", "/v1/identity", json.dumps(body).encode(), key=b""))[0]

    async def open(self, target: str, body: dict[str, object] | None = None) -> Stream:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        payload = json.dumps(body or {}).encode()
        head = f"POST {target} HTTP/1.1\r\nAuthorization: Bearer {KEY.hex()}\r\nConnection: Upgrade\r\n"
        head += f"Upgrade: cpuos-frames/1\r\nContent-Length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        return Stream(reader, writer)

    async def tunnel(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        head = f"POST /v1/ports/{port}/connect HTTP/1.1\r\nAuthorization: Bearer {KEY.hex()}\r\n"
        writer.write(head.encode() + b"Connection: Upgrade\r\nUpgrade: tunnel\r\nContent-Length: 0\r\n\r\n")
        return reader, writer


class Stream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []

    async def next(self) -> Frame | None:
        while not self._frames:
            data = await self._reader.read(65536)
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def rest(self) -> list[Frame]:
        frames = []
        while (frame := await self.next()) is not None:
            frames.append(frame)
        return frames

    async def send(self, kind: FrameKind, payload: bytes = b"", *, offset: int = 0) -> None:
        self._writer.write(encode_frame(kind, payload, offset=offset))
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def guest(tmp_path):
    root = tmp_path / "root"
    for name in ("workspace", "tmp", "home/user"):
        (root / name).mkdir(parents=True)
    identity = load_identity(tmp_path / "key")
    agent = FakeAgent(A, node_key=identity.public_key, root=root)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        await agent.start(listener)
        yield Guest(path, identity)
        await agent.close()


async def test_freeze_and_thaw(guest, tmp_path):
    await guest.identify()
    ticks = tmp_path / "ticks"
    body = {"command": f"while :; do echo >> {ticks}; sleep 0.005; done", "cwd": "/"}
    stream = await guest.open(f"/v1/commands?id={COMMAND}", body)
    await until(ticks.exists)

    async def call(path: str, freeze: str, *, key: bytes = KEY) -> tuple[int, dict[str, Any]]:
        status, told = await guest.call("POST", path, json.dumps({"freeze": freeze}).encode(), key=key)
        return status, json.loads(told)

    status, told = await call("/v1/freeze", FREEZE)
    assert status == 200
    assert told["commands"] == [COMMAND]
    assert told["processes"] >= 1
    await stream.rest()
    await stream.close()
    size = ticks.stat().st_size
    assert await call("/v1/freeze", FREEZE) == (200, told)
    assert (await call("/v1/freeze", "0" * 32))[1]["code"] == "frozen"
    assert (await guest.call("GET", "/v1/commands"))[0] == 409
    assert await guest.identify() == 200
    for words in (
        {},
        {"incarnation": 1},
        {"incarnation": 1, "thaw": "0" * 32},
        {"incarnation": 1, "thaw": FREEZE, "frozen_as": "b" * 20},
        {"incarnation": 0, "thaw": FREEZE},
    ):
        assert await guest.identify(key=b"n" * 32, **words) == 401, words
    assert ticks.stat().st_size == size
    for _ in range(2):
        assert await guest.identify(key=b"n" * 32, incarnation=1, thaw=FREEZE) == 200
    await until(lambda: ticks.stat().st_size > size)
    assert (await guest.call("GET", "/v1/hello"))[0] == 401
    assert (await call("/v1/freeze", "0" * 32, key=b"n" * 32))[0] == 200
    assert (await call("/v1/thaw", FREEZE, key=b"n" * 32))[0] == 409
    assert (await call("/v1/thaw", "0" * 32, key=b"n" * 32))[1]["continued"] >= 1
    size = ticks.stat().st_size
    await until(lambda: ticks.stat().st_size > size)
    assert await guest.identify(key=b"n" * 32, incarnation=2, thaw=FREEZE) == 401


async def test_identity(guest):
    status, body = await guest.call("GET", "/v1/hello")
    assert (status, json.loads(body)["code"]) == (401, "identity_required")
    assert await guest.identify(sandbox="b" * 20) == 401
    assert await guest.identify(5) == 200
    assert await guest.identify(5) == 200
    assert await guest.identify(5, key=b"x" * 32) == 401
    assert await guest.identify(4) == 401
    assert await guest.identify(6, key=b"x" * 32) == 200
    assert (await guest.call("GET", "/v1/hello"))[0] == 401
    hello = json.loads((await guest.call("GET", "/v1/hello", key=b"x" * 32))[1])
    assert (hello["contract"], hello["sandbox"], hello["generation"]) == (1, A, 6)


async def test_a_command_from_start_to_end(guest):
    await guest.identify()
    stream = await guest.open(f"/v1/commands?id={COMMAND}", {"command": "echo out; echo err >&2; exit 3"})
    frames = await stream.rest()
    await stream.close()
    assert frames[0].kind is FrameKind.STARTED
    assert {(frame.kind, frame.payload, frame.offset) for frame in frames[1:-1]} == {
        (FrameKind.STDOUT, b"out\n", 0),
        (FrameKind.STDERR, b"err\n", 0),
    }
    ended = json.loads(frames[-1].payload)
    assert (ended["status"], ended["exit_code"], ended["stdout_bytes"]) == ("exited", 3, 4)
    again = await guest.open(f"/v1/commands/{COMMAND}/attach?stdout=2&stderr=0")
    assert [frame.payload for frame in await again.rest() if frame.kind is FrameKind.STDOUT] == [b"t\n"]
    await again.close()
    later = await guest.open(f"/v1/commands/{COMMAND}/attach?stdout=0&stderr=4")
    gap = next(frame for frame in await later.rest() if frame.kind is FrameKind.GAP)
    await later.close()
    assert json.loads(gap.payload) == {"stream": "stdout", "from": 0, "to": 2}
    assert (await guest.call("POST", f"/v1/commands/{COMMAND}/attach?stdout=99&stderr=0"))[0] == 400
    assert (await guest.call("DELETE", f"/v1/commands/{COMMAND}"))[0] == 200
    assert (await guest.call("GET", f"/v1/commands/{COMMAND}"))[0] == 404


async def test_the_ring_holds_the_program_back(guest):
    await guest.identify()
    stream = await guest.open(f"/v1/commands?id={COMMAND}", {"command": "head -c 3000000 /dev/zero"})
    received = 0
    while received < 1 << 20:
        frame = await stream.next()
        received += len(frame.payload) if frame.kind is FrameKind.STDOUT else 0
    facts = json.loads((await guest.call("GET", f"/v1/commands/{COMMAND}"))[1])
    assert (facts["status"], facts["stdout_bytes"]) == ("running", 1 << 20)
    while True:
        await stream.send(FrameKind.ACK, json.dumps({"stdout": received, "stderr": 0}).encode())
        frame = await stream.next()
        if frame.kind is FrameKind.ENDED:
            break
        received += len(frame.payload)
    await stream.close()
    assert received == 3_000_000


async def test_stdin_is_acknowledged_and_repeats_are_skipped(guest):
    await guest.identify()
    stream = await guest.open(f"/v1/commands?id={COMMAND}", {"argv": ["cat"], "stdin": "open"})
    await stream.send(FrameKind.STDIN, b"hello ", offset=0)
    await stream.send(FrameKind.STDIN, b"hello world", offset=0)
    await stream.send(FrameKind.STDIN_END, offset=11)
    frames = await stream.rest()
    await stream.close()
    assert b"".join(frame.payload for frame in frames if frame.kind is FrameKind.STDOUT) == b"hello world"
    told = [json.loads(frame.payload)["stdin"] for frame in frames if frame.kind is FrameKind.ACK]
    assert told[-1] == 11


async def test_kill_and_time_limit_end_the_tree(guest, tmp_path):
    await guest.identify()
    tree = "(setsid sleep 4711 &); sleep 4711 & sleep 4711"
    stream = await guest.open(f"/v1/commands?id={COMMAND}", {"command": tree})
    await stream.next()
    status, body = await guest.call("POST", f"/v1/commands/{COMMAND}/kill", b'{"signal": 9, "reason": "enough"}')
    assert status == 200, body
    ended = json.loads((await stream.rest())[-1].payload)
    await stream.close()
    assert (ended["status"], ended["reason"], ended["signal"]) == ("killed", "enough", 9)
    said, limit_s = tmp_path / "said", 0.2
    while not said.exists():  # a machine that stands still gives it no time to say anything
        command = f"echo a; touch {said}; {tree}"
        limited = await guest.open(f"/v1/commands?id={os.urandom(8).hex()}", {"command": command, "timeout_s": limit_s})
        frames = await limited.rest()
        await limited.close()
        assert json.loads(frames[-1].payload)["status"] == "timed_out"
        limit_s *= 4
    assert frames[1].payload == b"a\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"argv": ["no-such-program"]}, "program_not_found"),
        ({"argv": ["true"], "cwd": "/nowhere"}, "cwd_not_found"),
        ({"argv": ["true"], "user": "stranger"}, "user_not_found"),
    ],
)
async def test_what_cannot_start_is_an_answer(guest, body, code):
    await guest.identify()
    status, answer = await guest.call("POST", f"/v1/commands?id={COMMAND}", json.dumps(body).encode())
    assert (status >= 400, json.loads(answer)["code"]) == (True, code)
    assert json.loads((await guest.call("GET", "/v1/commands"))[1]) == {"commands": []}


async def test_files(guest):
    await guest.identify()
    name = "a%20b/%FF%C3%A9"
    status, body = await guest.call("PUT", f"/v1/files?path={name}&mode=0600", b"data")
    info = json.loads(body)
    assert (status, info["size"], info["mode"]) == (200, 4, 0o600)
    assert base64.b64decode(info["raw"]) == b"/workspace/a b/\xff\xc3\xa9"
    assert await guest.call("GET", f"/v1/files?path={name}&offset=1&length=2") == (200, b"at")
    for target, code in [
        (f"PUT /v1/files?path={name}&exclusive=true", "file_exists"),
        ("GET /v1/files?path=a%20b", "is_a_directory"),
        ("GET /v1/files?path=missing", "file_not_found"),
        ("DELETE /v1/files?path=a%20b", "directory_not_empty"),
        (f"GET /v1/files/list?path={name}", "not_a_directory"),
        (f"GET /v1/files?path={'x' * 300}", "file_name_invalid"),
    ]:
        method, _, path = target.partition(" ")
        assert json.loads((await guest.call(method, path))[1])["code"] == code, target
    entries = json.loads((await guest.call("GET", "/v1/files/list?path=/workspace&depth=2"))[1])["entries"]
    assert [entry["kind"] for entry in entries] == ["directory", "file"]


async def test_a_tunnel_to_a_loopback_port(guest):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.read())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await guest.identify()
        reader, writer = await guest.tunnel(port)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"got hello"
        writer.close()
        await writer.wait_closed()
    for refused, status, code in ((port, 404, "port_not_open"), (1, 403, "port_forbidden"), (70000, 400, "invalid")):
        reader, writer = await guest.tunnel(refused)
        assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == str(status).encode()
        assert code.encode() in await reader.read(4096)
        writer.close()
        await writer.wait_closed()
    assert json.loads((await guest.call("POST", "/v1/ports/80/connect"))[1])["code"] == "invalid"
