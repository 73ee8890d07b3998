"""A sandbox dies while calls are under way: its network died with it, so that no connection says so. Who waits is told
at once, in a gateway as it runs: a process with its own kind of event loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from gateway_process import GatewayProcess, fixed_dialler, gateway_process
from gateway_rig import SANDBOX, DataClient, TicketMint, error_code, go_agent

from cpuos.testing.hostile_agent import HostileAgent, Misdeed
from cpuos.testing.waiting import until

SOON_S = 10.0
"""An agent may take 30 s for its answer, and its body 120 s."""
CALLS = [
    ("POST", "/commands", {"json": {"command": "true", "cwd": "/", "detach": True}}),
    ("GET", "/files?path=/x", {}),
    ("PUT", "/files?path=/x", {"content": b"x"}),
    ("GET", "/files/stat?path=/x", {}),
    ("GET", "/files/list?path=/x", {}),
    ("GET", "/files/tree?path=/x", {}),
    ("PUT", "/files/tree?path=/x", {"content": b"x"}),
    ("POST", "/files/mkdir?path=/x", {}),
    ("POST", "/files/move?path=/x&to=/y", {}),
    ("DELETE", "/files?path=/x", {}),
    ("GET", "/files/watch?path=/x", {}),
]


@asynccontextmanager
async def attached(folder: Path, port: int) -> AsyncIterator[tuple[GatewayProcess, DataClient, TicketMint]]:
    mint = TicketMint(folder)
    async with gateway_process(folder, port) as process, DataClient(process.url, mint.ticket()) as client:
        await control(process, "attach", {"generation": 1, "hostname": "box"})
        yield process, client, mint


async def control(process: GatewayProcess, verb: str, body: object) -> None:
    transport = httpx2.AsyncHTTPTransport(uds=str(process.folder / "gateway.sock"))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as client:
        answer = await client.post(f"/v1/sandboxes/{SANDBOX}/{verb}", json=body)
        assert answer.status_code < 300, answer.text


async def lose(process: GatewayProcess) -> None:
    await control(process, "detach", {"reason": "lost", "text": "its process ended"})


async def test_calls_that_wait_for_an_answer(tmp_path: Path) -> None:
    async with HostileAgent(SANDBOX) as agent, attached(tmp_path, agent.address[1]) as (process, client, mint):
        agent.misbehave(Misdeed.NEVER_ANSWER, at="/v1/files")
        agent.misbehave(Misdeed.NEVER_ANSWER, at="/v1/commands")
        before = len(agent.requests)
        link = client.http.get(f"/v1/links/{mint.ticket(scope=['link'], path='/x')}", headers={"Authorization": ""})
        waiting = [asyncio.create_task(client.call(method, path, **rest)) for method, path, rest in CALLS]
        waiting.append(asyncio.create_task(link))
        await until(lambda: len(agent.requests) == before + len(waiting))
        began = time.monotonic()
        await lose(process)
        started, *others = await asyncio.gather(*waiting)
        assert time.monotonic() - began < SOON_S
        assert (started.status_code, started.json()["status"]) == (201, "sandbox_lost")
        assert started.json()["reason"] == "its process ended"
        assert {(other.status_code, error_code(other)) for other in others} == {(410, "sandbox_lost")}
        assert {other.json()["error"]["why"] for other in others} == {"its process ended"}


async def test_bodies_that_are_on_their_way(agent_binary: Path, tmp_path: Path) -> None:
    dialler = fixed_dialler(1)
    size = 64 << 20
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(size >> 16):
            sent += 1
            yield bytes(1 << 16)

    async with (
        go_agent(agent_binary, tmp_path, dialler) as agent,
        attached(tmp_path, dialler.address[1]) as (process, client, _),
        client.http.stream("GET", f"{client.base}/files?path={tmp_path}/large") as download,
    ):
        pieces = download.aiter_raw()
        assert await anext(pieces)
        os.kill(agent, signal.SIGSTOP)
        headers = {"content-length": str(size)}
        upload = asyncio.create_task(
            client.call("PUT", f"/files?path={tmp_path}/other", content=body(), headers=headers)
        )
        await until(lambda: sent)
        began = time.monotonic()
        await lose(process)
        with pytest.raises(httpx2.RemoteProtocolError):
            async for _ in pieces:
                pass
        assert error_code(await upload) == "sandbox_lost"
        assert time.monotonic() - began < SOON_S


async def test_a_watch_says_why_it_ends(agent_binary: Path, tmp_path: Path) -> None:
    dialler = fixed_dialler(1)
    async with (
        go_agent(agent_binary, tmp_path, dialler) as agent,
        attached(tmp_path, dialler.address[1]) as (process, client, _),
        client.http.stream("GET", f"{client.base}/files/watch?path={tmp_path}") as watch,
    ):
        pieces = watch.aiter_raw()
        assert await anext(pieces)
        os.kill(agent, signal.SIGSTOP)
        await lose(process)
        async with asyncio.timeout(SOON_S):
            rest = b"".join([piece async for piece in pieces])
        assert json.loads(rest[rest.index(b"{") :])["error"]["code"] == "sandbox_lost"
