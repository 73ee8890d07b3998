"""The peek as a process without rights: it gets its sockets from outside, and ends without leaving a way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading

import pytest
from peek_rig import WEB, learned, policy_of
from test_client_hello import made_by_python

from cpuos.node.network.workers.calls import Operation
from cpuos.node.network.workers.messages import Close, Open, PolicyChange, Sockets, Start, WantSockets
from cpuos.node.network.workers.supervisor import StartCall, Timing, Worker
from cpuos.testing.waiting import until
from router_world import RouterWorld, router_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SANDBOX = "s" * 20
ALLOW = {"allow": ["*.allowed.test"]}
NAMES = learned(www_allowed_test=WEB)
HELLO = made_by_python("www.allowed.test")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with router_world(tmp_path_factory.mktemp("world")) as made:
        yield made


class Node:
    """What the node does for the peek."""

    def __init__(self, world: RouterWorld) -> None:
        self.world = world
        self.heard, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heard.setblocking(False)
        self._told = told
        self.worker = Worker(
            "peek",
            start=lambda: StartCall(message=Start(), descriptors=[told.fileno()]),
            questions=[Operation(WantSockets, self._give)],
            on_restart=self.open,
            timing=Timing(first_backoff_s=0.01),
        )

    async def open(self, worker: Worker) -> None:
        listener = self.world.peek.fileno()
        await worker.request(Open(sandbox=SANDBOX, policy=policy_of(ALLOW)), descriptors=[listener])

    async def _give(self, message: WantSockets, descriptors) -> None:
        made = await asyncio.to_thread(self.world.router.peek_sockets, message.count)
        try:
            await self.worker.request(Sockets(sandbox=SANDBOX), descriptors=[one.fileno() for one in made])
        finally:
            for one in made:
                one.close()

    async def next(self) -> dict:
        return json.loads(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.heard, 65536), 30))

    def close(self) -> None:
        self.heard.close()
        self._told.close()


@pytest.fixture
async def node(world):
    world.apply(ALLOW, learned=NAMES)
    made = Node(world)
    async with made.worker:
        await made.open(made.worker)
        yield made
    made.close()
    world.fresh()


def say(world: RouterWorld, data: bytes, *, count: int | None = None) -> bytes:
    """Blocks: for a thread."""
    with world.guest_socket() as made:
        made.connect((WEB, 443))
        made.sendall(data)
        taken = b""
        while len(taken) < (count or len(data)):
            piece = made.recv(65536)
            if not piece:
                break
            taken += piece
        return taken


async def test_names_are_read_in_a_process_without_rights(world, node):
    with world.server(443):
        assert await asyncio.to_thread(say, world, HELLO) == HELLO
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(say, world, made_by_python("www.denied.test"))
        assert (await node.next())["event"] == "open"
        refused = await node.next()
    assert (refused["event"], refused["name"]) == ("refused", "www.denied.test")
    closed = await node.next()  # its server has ended now
    assert closed["bytes_sent"] == closed["bytes_received"] == len(HELLO)


async def test_bulk_is_carried_whole(world, node):
    data = HELLO + b"\x17\3\3\0\1x" + os.urandom(20_000_000)
    with world.server(443):
        assert await asyncio.to_thread(_exchange, world, data) == data


async def test_a_killed_peek_refuses_and_the_next_one_serves(world, node):
    with world.server(443):
        held = await asyncio.to_thread(_open, world)
        with held:
            assert node.worker.pid is not None
            os.kill(node.worker.pid, signal.SIGKILL)
            assert await asyncio.to_thread(_is_over, held)
        await until(lambda: node.worker.restarts)
        async with asyncio.timeout(60):
            await node.worker.wait_ready()
        assert await asyncio.to_thread(say, world, HELLO) == HELLO


async def test_off_and_close(world, node):
    with world.server(443):
        with await asyncio.to_thread(_open, world) as held:
            await node.worker.request(PolicyChange(sandbox=SANDBOX, policy=policy_of("off", version=2)))
            with pytest.raises(ConnectionResetError):
                held.recv(1)
        await node.worker.request(Close(sandbox=SANDBOX))
        await node.worker.request(Close(sandbox=SANDBOX))


def _open(world: RouterWorld) -> socket.socket:
    made = world.guest_socket()
    made.connect((WEB, 443))
    made.sendall(HELLO)
    assert made.recv(len(HELLO), socket.MSG_WAITALL) == HELLO
    return made


def _is_over(held: socket.socket) -> bool:
    try:
        return held.recv(1) == b""
    except ConnectionResetError:
        return True


def _exchange(world: RouterWorld, data: bytes) -> bytes:
    with world.guest_socket() as made:
        made.connect((WEB, 443))
        sending = threading.Thread(target=made.sendall, args=(data,))
        sending.start()
        taken = bytearray()
        while len(taken) < len(data):
            piece = made.recv(1 << 20)
            if not piece:
                break
            taken += piece
        sending.join()
        return bytes(taken)
