"""Heads without end, in size or time, end; early answers and kept connections are served as before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from cpuos import bounded
from cpuos.bounded import MAX_HEAD_BYTES, BoundedProtocol
from cpuos.testing.waiting import until

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Answers before it reads: 200 to GET, 403 to the rest."""
    status = 200 if scope["method"] == "GET" else 403
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    config = Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=30)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: BoundedProtocol(config=config, server_state=state, app_state={}), host="127.0.0.1"
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()


async def ends(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What came until the other side closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(30):
            got = await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()
    return got


@pytest.mark.parametrize(
    "head",
    [
        [b"GET / HTTP/1.1\r\n", *[b"X: " + b"a" * 1000 + b"\r\n"] * 64],  # many lines
        [b"GET / HTTP/1.1\r\nX: ", *[b"a" * 1000] * 64],  # one line without end
        [b"GET /", *[b"a" * 1000] * 64],  # a path without end
        [b"GET / HTTP/1.1\r\n", *[b"a" * 1000] * 64],  # a name without end
        [b"\r\n" * 500] * 64,  # nothing at all
        [REQUEST, b"GET / HTTP/1.1\r\nX: ", *[b"a" * 1000] * 64],  # behind a good one
        [b"GET / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"],  # in one piece
    ],
)
async def test_a_head_without_end_is_cut(head: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "HEAD_S", 600)
    async with served() as port:
        got = await ends(port, *head)
        assert b"200" not in got or head[0] is REQUEST
        assert got.count(b" 200 ") <= 1


@pytest.mark.parametrize(
    "pieces",
    [[b""], [b"G"], [b"GET / HTTP/1.1\r\nX: "], [REQUEST, b"\r\n"], [REQUEST, b"GET /"]],
)
async def test_a_slow_head_is_cut(pieces: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "HEAD_S", 0.2)
    async with served() as port:
        assert (await ends(port, *pieces, pause_s=0.05)).count(b" 200 ") == pieces.count(REQUEST)


async def test_an_early_answer_arrives_before_a_long_body_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as port:
        head = b"PUT / HTTP/1.1\r\nContent-Length: 4000000\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        for _ in range(40):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert b" 403 " in await reader.readuntil(b"ok")
        writer.write(REQUEST)  # the connection is as good as before
        assert b" 200 " in await reader.readuntil(b"ok")
        writer.close()
        # The same body drop by drop is not read for ever.
        monkeypatch.setattr(bounded, "HEAD_S", 0.5)
        assert b" 403 " in await ends(port, head, *[b"x"] * 5, pause_s=0.05)


async def test_kept_connections_may_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "HEAD_S", 0.1)
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(REQUEST)
            assert b" 200 " in await reader.readuntil(b"ok")
            await asyncio.sleep(0.2)
        writer.close()


async def test_connections_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_CONNECTIONS", 3)
    async with served() as port:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, writer in kept:
            writer.write(REQUEST)
            assert b" 200 " in await reader.readuntil(b"ok")
        assert await ends(port, REQUEST) == b""
        for _, writer in kept:
            writer.close()

        async def there_is_room() -> bool:
            return b" 200 " in await ends(port, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")

        await until(there_is_room)
