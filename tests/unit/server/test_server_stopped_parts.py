"""A part that is stopped while it works on a call answers by its web server alone, or not at all: both are said as a
part that is away, which is tried again, and not as a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cpuos.errors import PlatformError, Unavailable
from cpuos.node.client import LocalNodeClient
from cpuos.server.connections import LocalConnectionRecords
from cpuos.server.gateway import LocalGatewayControl

_BARE = b"HTTP/1.1 500 x\r\ncontent-type: text/plain\r\ncontent-length: 21\r\n\r\nInternal Server Error"
_SAID = b'HTTP/1.1 500 x\r\ncontent-length: 63\r\n\r\n{"error": {"code": "internal", "what": "cannot x", "why": "y"}}'


async def ask_node(socket: Path) -> object:
    async with LocalNodeClient(socket) as client:
        return await client.get("a" * 20)


async def ask_gateway(socket: Path) -> object:
    control = LocalGatewayControl(socket)
    try:
        return await control.activity()
    finally:
        await control.aclose()


async def ask_records(socket: Path) -> object:
    records = LocalConnectionRecords(socket)
    try:
        return await records.page(0, limit=1)
    finally:
        await records.aclose()


ASKS = [ask_node, ask_gateway, ask_records]


@pytest.mark.parametrize(
    ("ask", "code"),
    [(ask_node, "node_unavailable"), (ask_gateway, "gateway_unavailable"), (ask_records, "node_unavailable")],
)
@pytest.mark.parametrize("answer", [_BARE, b""], ids=["bare", "none"])
async def test_one_that_stopped_is_away(
    tmp_path: Path, ask: Callable[[Path], Awaitable[object]], code: str, answer: bytes
) -> None:
    with pytest.raises(Unavailable) as caught:
        await _with_answer(tmp_path / "socket", answer, ask)
    assert caught.value.code == code


@pytest.mark.parametrize("ask", ASKS)
async def test_one_that_says_what_went_wrong_is_quoted(
    tmp_path: Path, ask: Callable[[Path], Awaitable[object]]
) -> None:
    with pytest.raises(PlatformError, match="cannot x"):
        await _with_answer(tmp_path / "socket", _SAID, ask)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("body", [b"", b"fine", b"null"])
async def test_one_that_answers_nothing_readable_is_at_fault(
    tmp_path: Path, ask: Callable[[Path], Awaitable[object]], body: bytes
) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    with pytest.raises(PlatformError, match="cannot read the answer: HTTP 200"):
        await _with_answer(tmp_path / "socket", answer, ask)


async def _with_answer(socket: Path, answer: bytes, ask: Callable[[Path], Awaitable[object]]) -> object:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, socket):
        return await ask(socket)
