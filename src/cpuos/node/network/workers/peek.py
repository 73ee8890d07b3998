"""The peek's process: connections of all sandboxes whose host name has to be read.

Start: its feed as descriptor. Open: the listening TCP socket of the sandbox's router.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from cpuos.node.network.peek.feed import PeekFeed
from cpuos.node.network.peek.sandbox import PeekedSandbox, PeekLimits, PeekWorld
from cpuos.node.network.workers.base import NodeLine, run_worker
from cpuos.node.network.workers.calls import Done, Operation
from cpuos.node.network.workers.channel import Breach, Descriptors
from cpuos.node.network.workers.messages import Close, Host, Open, PolicyChange, Sockets, Start, WantSockets
from cpuos.node.network.workers.served import Served

__all__ = ["PeekWorker"]


class PeekWorker:
    def __init__(self, node: NodeLine) -> None:
        self._node = node
        self._world: PeekWorld | None = None
        self._served: Served[PeekedSandbox] = Served()

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(Start, self._start),
            Operation(Open, self._open),
            Operation(PolicyChange, self._change),
            Operation(Sockets, self._take_sockets),
            Operation(Host, self._host),
            Operation(Close, self._served.shut),
        ]

    async def close(self) -> None:
        await self._served.close()
        if self._world is not None:
            self._world.feed.close()

    async def _start(self, message: Start, descriptors: Descriptors) -> None:
        feed = PeekFeed(descriptors.take_socket() if descriptors else None, clock=time.time)
        # Each of them is an entry of the guest's side and one of the peek's own.
        limits = PeekLimits(connections=max(1, message.limits.concurrent_connections // 2))
        self._world = PeekWorld(feed=feed, order_sockets=self._order, limits=limits)

    async def _open(self, message: Open, descriptors: Descriptors) -> None:
        if self._world is None:
            raise Breach("an open came before the start")
        await self._served.forget(message.sandbox)
        listener = descriptors.take_socket()
        if listener.type != socket.SOCK_STREAM:
            listener.close()
            raise Breach("a listening TCP socket is needed")
        peeked = PeekedSandbox(message.sandbox, message.policy, listener=listener, world=self._world)
        self._served.put(message.sandbox, peeked)

    async def _change(self, message: PolicyChange, descriptors: Descriptors) -> None:
        served = self._served.get(message.sandbox)
        if served is not None:
            served.set_policy(message.policy)

    async def _take_sockets(self, message: Sockets, descriptors: Descriptors) -> None:
        served = self._served.get(message.sandbox)
        while served is not None and len(descriptors):
            served.stock.add(descriptors.take_socket())

    async def _host(self, message: Host, descriptors: Descriptors) -> None:
        """Addresses are the kernel's: the sockets are made where its rules hold."""

    async def _order(self, sandbox: str, count: int) -> None:
        await self._node.ask(WantSockets(sandbox=sandbox, count=count), answer=Done)


if __name__ == "__main__":
    run_worker(PeekWorker)
