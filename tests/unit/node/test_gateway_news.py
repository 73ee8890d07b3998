"""The gateway hears of kills for memory and of sandboxes that stand still, and nothing waits for it."""

from __future__ import annotations

import asyncio
import json

from cpuos.node.gateway_news import GatewayNews

ID = "a" * 20


async def test_kill_is_posted_with_its_ancestors(tmp_path):
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def gateway(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await heard.put(head.split(b"\r\n")[0])
        await heard.put(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(gateway, tmp_path / "gateway.sock")
    async with server:
        news = GatewayNews(tmp_path / "gateway.sock")
        news.tell_killed(ID, (9, 7, 3))
        assert await heard.get() == f"POST /v1/sandboxes/{ID}/oom HTTP/1.1".encode()
        assert json.loads(await heard.get()) == {"pids": [9, 7, 3]}
        news.tell_halted(ID, halted=True)
        assert await heard.get() == f"POST /v1/sandboxes/{ID}/halted HTTP/1.1".encode()
        assert json.loads(await heard.get()) == {"halted": True}
        await asyncio.gather(*news._telling)


async def test_gateway_that_is_down_or_talks_rubbish_is_borne(tmp_path):
    news = GatewayNews(tmp_path / "gateway.sock")
    news.tell_killed(ID, (9,))
    await asyncio.gather(*news._telling)

    async def rubbish(reader, writer):
        writer.write(b"x" * 100)
        writer.close()

    async with await asyncio.start_unix_server(rubbish, tmp_path / "gateway.sock"):
        news.tell_killed(ID, (9,))
        news.tell_killed(ID, ())
        await asyncio.gather(*news._telling)
