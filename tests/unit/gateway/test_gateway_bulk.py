"""Large bodies from socket to socket: every byte, every early end, and what follows on the same connection."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from gateway_rig import DataClient, Rig

from cpuos.gateway.bulk import WAKE_BYTES, Buffer, Carried, Cut, Pipe, carry
from cpuos.testing.waiting import until

MIB = 1 << 20


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def pairs() -> Iterator[tuple[socket.socket, ...]]:
    """Far end and near end of a source, near end and far end of a target; TCP, as both are."""
    made = (*_tcp_pair(), *reversed(_tcp_pair()))
    yield made
    for end in made:
        end.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        far = socket.create_connection(listening.getsockname())
        near, _ = listening.accept()
    for end in (far, near):
        end.setblocking(False)
    return far, near


def head(client: DataClient, method: str, path: str, *, length: int | None = None) -> bytes:
    lines = [f"{method} {client.base}{path} HTTP/1.1", "Host: x"]
    lines.append(f"Authorization: {client.http.headers['Authorization']}")
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


async def connect(client: DataClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = client.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def test_what_follows_a_large_upload_on_its_connection_is_served(client: DataClient, work: Path) -> None:
    data = os.urandom(9 * MIB + 5)
    reader, writer = await connect(client)
    put = head(client, "PUT", f"/files?path={quote(str(work / 'blob'))}", length=len(data))
    stat = head(client, "GET", f"/files/stat?path={quote(str(work / 'blob'))}")
    writer.write(put + data + stat)
    assert (await read_answer(reader))[0] == 200
    status, told = await read_answer(reader)
    assert status == 200
    assert b'"size":%d' % len(data) in told
    assert (work / "blob").read_bytes() == data
    writer.write(head(client, "GET", f"/files?path={quote(str(work / 'blob'))}") + stat)
    status, body = await read_answer(reader)
    assert hashlib.sha256(body).digest() == hashlib.sha256(data).digest()
    assert (await read_answer(reader))[1] == told
    writer.close()


async def test_the_rest_of_a_refused_upload_is_passed_over(client: DataClient, work: Path) -> None:
    reader, writer = await connect(client)
    put = head(client, "PUT", f"/files?path={quote(str(work))}", length=24 * MIB)
    writer.write(put + b"x" * (2 * MIB))
    assert (await read_answer(reader))[0] == 409
    stat = head(client, "GET", f"/files/stat?path={quote(str(work))}")
    writer.write(b"x" * (22 * MIB) + stat)
    assert (await read_answer(reader))[0] == 200
    writer.close()
    assert os.listdir(work) == []


async def test_a_large_upload_that_the_client_cuts_leaves_nothing(client: DataClient, rig: Rig, work: Path) -> None:
    _, writer = await connect(client)
    writer.write(head(client, "PUT", f"/files?path={quote(str(work / 'cut'))}", length=8 * MIB) + b"x" * (5 * MIB))
    await writer.drain()
    writer.close()
    outcome = await _outcome(rig)
    assert (outcome["result"], outcome["detail"]["code"]) == ("error", "upload_incomplete")
    await until(lambda: os.listdir(work) == [])


async def test_a_large_download_that_the_client_leaves(client: DataClient, rig: Rig, work: Path) -> None:
    (work / "blob").write_bytes(bytes(64 * MIB))
    reader, writer = await connect(client)
    writer.write(head(client, "GET", f"/files?path={quote(str(work / 'blob'))}"))
    await reader.readexactly(MIB)
    writer.transport.abort()
    outcome = await _outcome(rig)
    assert (outcome["result"], outcome["detail"]["error"]) == ("unknown", "the client left")
    assert (await client.call("GET", f"/files/stat?path={quote(str(work / 'blob'))}")).status_code == 200


async def test_a_reader_that_pauses_gets_every_byte(client: DataClient, work: Path) -> None:
    data = os.urandom(20 * MIB)
    (work / "blob").write_bytes(data)
    reader, writer = await connect(client)
    reader._transport.pause_reading()
    writer.write(head(client, "GET", f"/files?path={quote(str(work / 'blob'))}"))
    await asyncio.sleep(0.2)  # until all buffers between are full
    reader._transport.resume_reading()
    assert (await read_answer(reader))[1] == data
    writer.close()


async def _outcome(rig: Rig) -> dict:
    async def outcomes() -> list[dict]:
        return [entry for entry in await rig.journal() if entry["phase"] == "outcome"]

    return (await until(outcomes))[-1]


@pytest.mark.parametrize("kind", ["buffer", "pipe"])
async def test_bytes_arrive_whole_and_in_order(pairs: tuple[socket.socket, ...], kind: str) -> None:
    far_source, source, target, far_target = pairs
    loop = asyncio.get_running_loop()
    data = os.urandom(3 * MIB + 17)
    carried = Carried()

    async def drain() -> bytes:
        got = bytearray()
        while len(got) < len(data):
            got += await loop.sock_recv(far_target, 70_001)
        return bytes(got)

    with Pipe() if kind == "pipe" else Buffer(source, len(data)) as hold:
        _, got, _ = await asyncio.gather(
            loop.sock_sendall(far_source, data + b"next"),
            drain(),
            carry(source, target, len(data), hold=hold, carried=carried, give_up=loop.create_future()),
        )
    assert got == data
    assert (carried.read, carried.written) == (len(data), len(data))
    assert source.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    assert source.recv(100) == b"next"


@pytest.mark.parametrize("kind", ["buffer", "pipe"])
async def test_a_source_that_ends_early_is_a_cut(pairs: tuple[socket.socket, ...], kind: str) -> None:
    far_source, source, target, _ = pairs
    far_source.send(b"x" * 1000)
    far_source.close()
    carried = Carried()
    give_up = asyncio.get_running_loop().create_future()
    with Pipe() if kind == "pipe" else Buffer(source, MIB) as hold, pytest.raises(Cut) as caught:
        await carry(source, target, MIB, hold=hold, carried=carried, give_up=give_up)
    assert caught.value.source
    assert carried.read == 1000


async def test_a_target_that_is_gone_is_a_cut(pairs: tuple[socket.socket, ...]) -> None:
    far_source, source, target, far_target = pairs
    far_target.close()
    loop = asyncio.get_running_loop()
    feeding = asyncio.create_task(loop.sock_sendall(far_source, bytes(8 * MIB)))
    with Pipe() as hold, pytest.raises(Cut) as caught:
        await carry(source, target, 8 * MIB, hold=hold, carried=Carried(), give_up=loop.create_future())
    assert not caught.value.source
    feeding.cancel()


async def test_a_slow_source_counts_as_one_that_sends(pairs: tuple[socket.socket, ...]) -> None:
    """Fewer bytes than it wakes for are no silence; no bytes are."""
    far_source, source, target, far_target = pairs
    loop = asyncio.get_running_loop()
    carried = Carried()
    far_source.send(b"x" * 10)
    assert WAKE_BYTES > 10
    with Buffer(source, MIB) as hold, pytest.raises(TimeoutError):
        await carry(source, target, MIB, hold=hold, carried=carried, give_up=loop.create_future(), read_limit_s=0.05)
    assert carried.written == 10
    assert far_target.recv(100) == b"x" * 10


async def test_giving_up_ends_a_wait(pairs: tuple[socket.socket, ...]) -> None:
    _, source, target, _ = pairs
    give_up = asyncio.get_running_loop().create_future()
    with Buffer(source, MIB) as hold:
        work = asyncio.create_task(carry(source, target, MIB, hold=hold, carried=Carried(), give_up=give_up))
        await asyncio.sleep(0)
        give_up.set_result(None)
        await work
