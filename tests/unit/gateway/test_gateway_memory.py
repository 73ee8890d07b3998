"""Memory stays flat, whoever is slow or big."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from gateway_process import GatewayProcess, fixed_dialler, gateway_process
from gateway_rig import SANDBOX, DataClient, TicketMint, go_agent

GROWTH_KIB = 48 << 10


@pytest.fixture
async def process(agent_binary: Path, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    TicketMint(tmp_path)
    dialler = fixed_dialler(1)
    async with go_agent(agent_binary, tmp_path, dialler), gateway_process(tmp_path, dialler.address[1]) as process:
        transport = httpx2.AsyncHTTPTransport(uds=str(tmp_path / "gateway.sock"))
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as client:
            body = {"generation": 1, "hostname": "box"}
            assert (await client.post(f"/v1/sandboxes/{SANDBOX}/attach", json=body)).status_code == 200
        yield process


@pytest.fixture
def mint(tmp_path: Path) -> TicketMint:
    return TicketMint(tmp_path)


def peak_kib(process: GatewayProcess) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


async def test_slow_and_stalled_readers(process: GatewayProcess, mint: TicketMint) -> None:
    """Forty clients that stop reading, of a program that writes 100 MB."""
    async with DataClient(process.url, mint.ticket()) as client:
        await client.exec("true")
        before = peak_kib(process)
        command_id = await client.spawn("head -c 100000000 /dev/zero")
        host, port = process.url.removeprefix("http://").split(":")
        writers = []
        for _ in range(40):
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            reader._transport.pause_reading()
            head = f"GET {client.base}/commands/{command_id}/stream HTTP/1.1\r\nHost: x\r\n"
            writer.write(f"{head}Authorization: Bearer {mint.ticket()}\r\n\r\n".encode())
            writers.append(writer)
        end = await client.wait(command_id)
        assert end["stdout_bytes"] == 100000000
        await asyncio.sleep(0.3)
        assert peak_kib(process) - before < GROWTH_KIB
        for writer in writers:
            writer.transport.abort()


async def test_big_files_both_ways(process: GatewayProcess, mint: TicketMint, tmp_path: Path) -> None:
    size = 96 << 20

    async def pieces():
        for _ in range(size >> 20):
            yield b"x" * (1 << 20)

    async with DataClient(process.url, mint.ticket()) as client:
        await client.exec("true")
        before = peak_kib(process)
        path = f"/files?path={tmp_path}/big"
        answer = await client.call("PUT", path, content=pieces(), headers={"Content-Length": str(size)})
        assert answer.json()["size"] == size
        got = 0
        async with client.http.stream("GET", client.base + path) as answer:
            async for piece in answer.aiter_raw():
                got += len(piece)
        assert got == size
        assert peak_kib(process) - before < GROWTH_KIB
