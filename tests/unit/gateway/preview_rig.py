"""Previews on loopback: servers of ours "inside", visitors that send exactly the bytes they are told to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h11
from gateway_rig import SANDBOX, Rig

from cpuos.gateway.previews.serve import PreviewListener, serve_previews

Headers = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a visitor got."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    interim: list[int]

    def all(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self.headers if key.lower() == name.encode()]

    def one(self, name: str) -> str | None:
        found = self.all(name)
        assert len(found) < 2, found
        return found[0] if found else None


class Visitor:
    """One connection to the listener of previews."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(
        self,
        method: str = "GET",
        target: str = "/",
        *,
        host: str,
        headers: Headers | None = None,
        body: bytes | None = None,
    ) -> Answer:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
        lines += [f"{name}: {value}" for name, value in headers or []]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
        return await self.answer(method)

    async def answer(self, method: str = "GET") -> Answer:
        """The next answer, read by a parser of its own."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        parser.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        parser.send(h11.EndOfMessage())
        head, body, interim = None, bytearray(), []
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await asyncio.wait_for(self.reader.read(65536), 30))
            elif isinstance(event, h11.InformationalResponse):
                interim.append(event.status_code)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                raise ConnectionError(f"the connection ended: {event!r}")
        assert head is not None
        return Answer(
            status=head.status_code, headers=list(head.headers.raw_items()), body=bytes(body), interim=interim
        )

    async def ended(self) -> bytes:
        """What comes until the connection's end."""
        try:
            return await asyncio.wait_for(self.reader.read(), 30)
        except ConnectionResetError:
            return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass


@dataclass(kw_only=True)
class Inside:
    """A server inside: keeps the heads and bodies that it was sent, byte for byte."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0

    @property
    def lines(self) -> list[bytes]:
        """Header lines of the last request."""
        return self.heads[-1].split(b"\r\n")[1:-2]

    def header(self, name: str) -> str | None:
        values = [
            line.partition(b":")[2].strip() for line in self.lines if line.lower().startswith(f"{name}:".encode())
        ]
        assert len(values) < 2, values
        return values[0].decode("latin-1") if values else None


Handler = Callable[[Inside, bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool | None]]


def answering(data: bytes, *, close: bool = False) -> Handler:
    """Every request gets exactly these bytes."""

    async def handle(inside: Inside, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        length = inside.header("content-length")
        inside.bodies.append(await reader.readexactly(int(length)) if length else b"")
        writer.write(data)
        await writer.drain()
        return not close

    return handle


OK = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nok")


@asynccontextmanager
async def serving(handler: Handler = OK, *, host: str = "127.0.0.1") -> AsyncIterator[Inside]:
    """A server on the loopback that the agent reaches; the handler says True where the connection goes on."""
    inside = Inside()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                inside.heads.append(head)
                if not await handler(inside, head, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = await asyncio.start_server(serve, host, 0, family=family)
    inside.port = server.sockets[0].getsockname()[1]
    try:
        yield inside
    finally:
        server.close()


@dataclass(kw_only=True)
class PreviewRig:
    """A gateway with its listener of previews."""

    rig: Rig
    url: str
    port: int
    visitors: list[Visitor] = field(default_factory=list)

    def host(self, port: int, *, sandbox: str = SANDBOX) -> str:
        return f"{port}-{sandbox}.preview.localhost:{self.port}"

    async def visitor(self) -> Visitor:
        visitor = Visitor(*await asyncio.open_connection("127.0.0.1", self.port))
        self.visitors.append(visitor)
        return visitor

    async def get(self, port: int, target: str = "/", *, headers: Headers | None = None, method: str = "GET") -> Answer:
        return await (await self.visitor()).request(method, target, host=self.host(port), headers=headers)

    async def publish(self, port: int, *, epoch: int = 1, generation: int = 1, **values: Any) -> None:
        body = {"epoch": epoch, "generation": generation, **values}
        answer = await self.rig.control.put(f"/v1/sandboxes/{SANDBOX}/ports/{port}", json=body)
        assert answer.status_code == 200, answer.text

    async def close_port(self, port: int, *, epoch: int = 1) -> int:
        answer = await self.rig.control.delete(f"/v1/sandboxes/{SANDBOX}/ports/{port}?epoch={epoch}")
        assert answer.status_code == 200, answer.text
        return answer.json()["ended_calls"]

    def token(self, shown_port: int, /, *, epoch: int = 1, **claims: Any) -> str:
        return self.rig.mint.ticket(**{"scope": ["preview"], "port": shown_port, "epoch": epoch, **claims})

    def auth(self, port: int, /, **claims: Any) -> Headers:
        return [("X-Cpuos-Preview-Token", self.token(port, **claims))]


@asynccontextmanager
async def open_previews(rig: Rig, **listener: Any) -> AsyncIterator[PreviewRig]:
    async with serve_previews(rig.gateway.previews, PreviewListener(port=0, **listener)) as url:
        previews = PreviewRig(rig=rig, url=url, port=int(url.rpartition(":")[2]))
        try:
            yield previews
        finally:
            for visitor in previews.visitors:
                await visitor.close()
