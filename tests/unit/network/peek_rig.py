"""A peek in a real router, with the kernel's rules, between a guest's place and servers outside. All in one loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from cpuos.node.network.nftables import NftContext
from cpuos.node.network.peek.feed import PeekFeed
from cpuos.node.network.peek.sandbox import PeekedSandbox, PeekLimits, PeekWorld
from cpuos.node.network.policy_rules import NamedAddress
from cpuos.testing.sealed import Authority
from cpuos.types.network import EffectivePolicy
from router_world import RouterWorld

SANDBOX = "s" * 20
WEB, OTHER = "93.184.215.14", "93.184.216.99"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def policy_of(*layers: Any, version: int = 1) -> EffectivePolicy:
    listed = [
        {"origin": "workspace" if len(layers) > 1 and not n else "sandbox", "policy": layer}
        for n, layer in enumerate(layers)
    ]
    return EffectivePolicy.model_validate({"version": version, "layers": listed})


def learned(**names: str) -> list[NamedAddress]:
    """`www_allowed_test="1.2.3.4"`."""
    return [NamedAddress(name=n.replace("_", "."), address=IPv4Address(a), ttl_s=300) for n, a in names.items()]


class PeekRig:
    """`await rig.use(policy, …)` puts a policy into kernel and peek."""

    def __init__(self, world: RouterWorld, *, limits: PeekLimits | None = None) -> None:
        self.world = world
        self.orders = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._authority = Authority()
        self._folder = Path(tempfile.mkdtemp())
        self._told, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        told.setsockopt(socket.SOL_SOCKET, 32, 4 << 20)  # SO_SNDBUFFORCE
        self._told.setblocking(False)
        self._world = PeekWorld(
            feed=PeekFeed(told, clock=lambda: 0.0), order_sockets=self._order, limits=limits or PeekLimits()
        )
        self.peek: PeekedSandbox | None = None

    async def use(self, *layers: Any, version: int = 1, names: list[NamedAddress] | None = None) -> None:
        self.world.apply(*layers, version=version, learned=names or [])
        policy = policy_of(*layers, version=version)
        if self.peek is None:
            listener = self.world.peek.dup()
            listener.setblocking(False)
            self.peek = PeekedSandbox(SANDBOX, policy, listener=listener, world=self._world)
        else:
            self.peek.set_policy(policy)

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)
        if self.peek is not None:
            await self.peek.close()
        self._world.feed.close()
        self._told.close()

    async def _order(self, sandbox: str, count: int) -> None:
        self.orders += 1
        assert self.peek is not None
        making = asyncio.ensure_future(asyncio.to_thread(self.world.router.peek_sockets, count))
        try:
            sockets = await asyncio.shield(making)
        except asyncio.CancelledError:
            for made in await making:  # nobody takes them any more
                made.close()
            raise
        for made in sockets:
            self.peek.stock.add(made)

    def told(self) -> list[dict[str, Any]]:
        """What the records worker would have read since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(json.loads(self._told.recv(65536)))
        return found

    async def told_of(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(30):
            while len(found) < count:
                found += [record for record in self.told() if record.get("event") == event]
                await asyncio.sleep(0.01)
        return found

    # outside

    @contextlib.asynccontextmanager
    async def server(self, port: int, handler: Handler, *, tls: bool = False) -> AsyncIterator[None]:
        made = self.world.in_outside(lambda: socket.create_server(("0.0.0.0", port), backlog=512))
        self.world.in_outside(lambda: _load(f"add element ip outside served {{ {port} }}"))
        context = self._authority.server_context(self._folder) if tls else None
        serving: set[asyncio.Task[Any]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            serving.add(task)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await handler(reader, writer)
            writer.close()

        server = await asyncio.start_server(serve, sock=made, ssl=context)
        try:
            yield
        finally:
            server.close()
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            self.world.in_outside(lambda: _load(f"delete element ip outside served {{ {port} }}"))

    # inside

    async def connect(self, address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._open(address, port)

    async def _open(self, address: str, port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made = self.world.guest_socket()
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, (address, port))
            reader, writer = await asyncio.open_connection(sock=made, **options)
        except BaseException:
            made.close()
            raise
        self._writers.append(writer)
        return reader, writer

    async def connect_tls(
        self, address: str, port: int, *, name: str | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """`name` None: a hello without a name."""
        context = ssl.create_default_context(cadata=self._authority.pem.decode())
        if name is None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return await self._open(address, port, ssl=context, server_hostname=name or "")

    async def ask(self, address: str, port: int, data: bytes, *, size: int = 1 << 20) -> bytes:
        """Send, in pieces, and read to the end; raises ConnectionResetError."""
        reader, writer = await self.connect(address, port)
        try:
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await writer.drain()
                if size < len(data):
                    await asyncio.sleep(0.001)
            async with asyncio.timeout(30):
                return await reader.read()
        finally:
            writer.close()

    async def ask_and_end(self, address: str, port: int, data: bytes) -> bytes:
        """Send all, say that this was all, and read to the end."""
        reader, writer = await self.connect(address, port)

        async def send() -> None:
            writer.write(data)
            await writer.drain()
            writer.write_eof()

        async with asyncio.timeout(30):
            sending = asyncio.create_task(send())
            taken = await reader.read()
            await sending
        writer.close()
        return taken

    @property
    def held(self) -> int:
        return self._world.buffer.held


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def tell_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An HTTP server that says what it was asked, and keeps the connection unless told otherwise."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("upgrade") == "websocket" and "decline" not in lines[0]:
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
            await echo(reader, writer)
            return
        answer = f"{headers.get('host')} {lines[0].split()[1]} {len(body)} {headers.get('upgrade', '-')}\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()
        if headers.get("connection") == "close":
            return


def _load(rules: str) -> None:
    context = NftContext()
    try:
        context.run(rules)
    finally:
        context.close()


__all__ = ["OTHER", "SANDBOX", "WEB", "PeekRig", "echo", "learned", "policy_of", "tell_requests"]
