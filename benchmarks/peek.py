"""Connections that the peek carries, beside those that pass the same router untouched.

`python -m benchmarks.peek` measures bulk between native programs too: then guest, peek and server share the processors,
and the figure says what reading and writing everything once more costs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

from benchmarks.results import Measured, compare_rates, compare_times
from benchmarks.stage import Stage, prefer, put_first
from cpuos import PIPE, Network, Sandbox
from cpuos.node.network.judge import Judge
from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.namespaces import inside
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.policy_rules import NamedAddress
from cpuos.node.network.router import Router
from cpuos.node.network.rules import PEEK_PORT, base_rules
from cpuos.node.network.workers.calls import Operation
from cpuos.node.network.workers.messages import Open, Sockets, Start, WantSockets
from cpuos.node.network.workers.supervisor import StartCall, Worker
from cpuos.testing.sealed import SealedSlot, SealedWorld, addresses
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer

__all__ = ["native_download", "native_upload", "peek_connect", "peek_download"]

_PEEKED, _DIRECT = 9443, 9444
_NAME = "www.allowed.test"
_SANDBOX = "0" * 20
_PIECE, _BULK = 1 << 20, 256 << 20
_ORDER = b"\x17\3\3\0\1"

Work = Callable[[SealedSlot, int], float]


# Waits for a port, takes the bytes from there, and tells how long that took.
_GUEST = f"""
import socket, struct, sys, time
hello = bytes.fromhex(sys.argv[1])
for port in map(int, sys.stdin):
    buffer = bytearray(1 << 20)
    began = time.monotonic()
    with socket.create_connection(("{_NAME}", port)) as made:
        made.sendall(hello)
        while made.recv_into(buffer):
            pass
    print(time.monotonic() - began, flush=True)
"""


def peek_download(stage: Stage) -> Measured:
    """Bytes a second that a program of a sandbox gets from outside."""
    times: dict[int, list[float]] = {_PEEKED: [], _DIRECT: []}
    network = Network(allow=[f"{_NAME}:{_PEEKED}", f"{addresses.WEB}:{_DIRECT}"])
    with SealedWorld() as world, world.instance(max_sandboxes=2) as instance, _server(world):
        world.names.set(_NAME, [addresses.WEB])
        node = instance.pids()["node"]
        workers = Path(f"/proc/{node}/task/{node}/children").read_text().split()
        put_first(instance.settings.instance_id, processes=[os.getpid(), *map(int, workers)])
        with Sandbox.create(client=instance.client(), template="python", network=network) as sandbox:
            job = sandbox.spawn(["python3", "-c", _GUEST, _hello(b"d").hex()], stdin=PIPE)
            for turn in range(2 * (max(9, 2 * stage.rounds) + 1)):
                port = (_PEEKED, _DIRECT)[turn % 2]
                job.write_stdin(f"{port}\n")
                while len(lines := job.output().split()) <= turn:
                    time.sleep(0.05)
                times[port].append(float(lines[turn]))
            job.close_stdin()
    return compare_rates(times[_PEEKED][1:], times[_DIRECT][1:], size_bytes=_BULK)


def native_download(stage: Stage) -> Measured:
    return compare_rates(*asyncio.run(_measure(_download, max(9, stage.rounds))), size_bytes=_BULK)


def native_upload(stage: Stage) -> Measured:
    return compare_rates(*asyncio.run(_measure(_upload, max(9, stage.rounds))), size_bytes=_BULK)


def peek_connect(stage: Stage) -> Measured:
    """Connect, hello, the first byte of the answer, close."""
    return compare_times(*asyncio.run(_measure(_connect, max(300, 60 * stage.rounds))))


async def _measure(work: Work, turns: int) -> tuple[list[float], list[float]]:
    """Times by the peek and past it, taken in turns."""
    peeked: list[float] = []
    direct: list[float] = []
    with SealedWorld() as world, world.slot(load_rules=_load_rules) as slot, _server(world):
        async with _peek(slot):
            prefer(os.getpid())
            for port in (_PEEKED, _DIRECT):
                await asyncio.to_thread(work, slot, port)
            for _ in range(turns):
                peeked.append(await asyncio.to_thread(work, slot, _PEEKED))
                direct.append(await asyncio.to_thread(work, slot, _DIRECT))
    return peeked, direct


def _download(slot: SealedSlot, port: int) -> float:
    with slot.socket(timeout_s=60) as one:
        one.connect((addresses.WEB, port))
        one.sendall(_hello(b"d"))
        begin, buffer, left = time.perf_counter(), bytearray(_PIECE), _BULK
        while left:
            left -= one.recv_into(buffer, min(_PIECE, left)) or _fail()
        return time.perf_counter() - begin


def _upload(slot: SealedSlot, port: int) -> float:
    with slot.socket(timeout_s=60) as one:
        one.connect((addresses.WEB, port))
        one.sendall(_hello(b"u"))
        begin, piece = time.perf_counter(), bytes(_PIECE)
        for _ in range(_BULK // _PIECE):
            one.sendall(piece)
        _ = one.recv(1) or _fail()
        return time.perf_counter() - begin


def _connect(slot: SealedSlot, port: int) -> float:
    with slot.socket(timeout_s=60) as one:
        begin = time.perf_counter()
        one.connect((addresses.WEB, port))
        one.sendall(_hello(b"c"))
        _ = one.recv(1) or _fail()
        return time.perf_counter() - begin


def _fail() -> int:
    raise RuntimeError("the connection ended early")


def _hello(order: bytes) -> bytes:
    """A real one; behind it, as a record of data, what the server is to do."""
    outgoing, context = ssl.MemoryBIO(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=_NAME).do_handshake()
    return outgoing.read() + _ORDER + order


# the far side


@contextmanager
def _server(world: SealedWorld) -> Iterator[None]:
    """On both ports, in a process of its own."""
    listeners = [
        inside(world.internet, partial(socket.create_server, ("0.0.0.0", port), backlog=64))
        for port in (_PEEKED, _DIRECT)
    ]
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(listeners,))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
        for listener in listeners:
            listener.close()


def _serve(listeners: list[socket.socket]) -> None:
    prefer(os.getpid())
    for listener in listeners:
        threading.Thread(target=_accept, args=(listener,)).start()


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            data = b""
            while (order := data.partition(_ORDER)[2][:1]) == b"":
                data += connection.recv(65536)
            taken = len(data.partition(_ORDER)[2]) - 1
            if order == b"d":
                piece = bytes(_PIECE)
                for _ in range(_BULK // _PIECE):
                    connection.sendall(piece)
            elif order == b"u":
                buffer, left = bytearray(_PIECE), _BULK - taken
                while left:
                    left -= connection.recv_into(buffer, min(_PIECE, left)) or left
            if order != b"d":
                connection.sendall(b"k")


# the router and its peek


def _load_rules(plan) -> None:  # type: ignore[no-untyped-def]
    context = NftContext()
    try:
        # No cap is met, however fast it goes.
        limits = NetworkLimits(
            concurrent_connections=60_000, new_connections_per_s=100_000, new_connections_burst=100_000
        )
        context.run(base_rules(plan, limits=limits))
    finally:
        context.close()


@asynccontextmanager
async def _peek(slot: SealedSlot) -> AsyncIterator[None]:
    allow = [f"{_NAME}:{_PEEKED}", f"{addresses.WEB}:{_DIRECT}"]
    layer = PolicyLayer(origin="sandbox", policy=NetworkPolicy.model_validate({"allow": allow}))
    policy = EffectivePolicy(version=1, layers=[layer])
    router = await asyncio.to_thread(Router.open, slot.router)
    learned = NamedAddress(name=_NAME, address=IPv4Address(addresses.WEB), ttl_s=3600)
    await asyncio.to_thread(router.apply, Judge(policy), learned=[learned])

    async def give(message: WantSockets, descriptors: object) -> None:
        made = await asyncio.to_thread(router.peek_sockets, message.count)
        try:
            await worker.request(Sockets(sandbox=_SANDBOX), descriptors=[one.fileno() for one in made])
        finally:
            for one in made:
                one.close()

    heard, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    start = StartCall(message=Start(), descriptors=[told.fileno()])
    worker = Worker("peek", start=lambda: start, questions=[Operation(WantSockets, give)])
    listener = slot.in_router(lambda: socket.create_server(("10.0.0.1", PEEK_PORT), backlog=512))
    with heard, told, listener:
        async with worker:
            prefer(worker.pid or os.getpid())
            await worker.request(Open(sandbox=_SANDBOX, policy=policy), descriptors=[listener.fileno()])
            yield
    router.close()


if __name__ == "__main__":
    for figure in (peek_connect, peek_download, native_download, native_upload):
        print(figure.__name__, figure(Stage(rounds=5)))
