"""The DNS worker: one unprivileged process with the forwarders of all sandboxes.

The socket says whose question it is: each sandbox has its own in its router namespace, and only descriptors are here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

import dns.rdata

from cpuos.node.network.forwarder.feed import Feed
from cpuos.node.network.forwarder.listeners import DatagramListener, StreamListener
from cpuos.node.network.forwarder.sandbox import Limits, SandboxForwarder, World
from cpuos.node.network.forwarder.upstream import Resolver, Upstream
from cpuos.node.network.workers.base import NodeLine, run_worker
from cpuos.node.network.workers.calls import Done, Operation
from cpuos.node.network.workers.channel import Breach, Descriptors
from cpuos.node.network.workers.messages import (
    Close,
    Host,
    Learn,
    Learned,
    LearnedAddress,
    LearnedName,
    Open,
    PolicyChange,
    Start,
)
from cpuos.node.network.workers.served import Served

__all__ = ["DnsWorker"]


@dataclass(frozen=True, kw_only=True)
class _Forwarding:
    forwarder: SandboxForwarder
    datagrams: DatagramListener
    streams: StreamListener

    async def close(self) -> None:
        await self.datagrams.close()
        await self.streams.close()
        await self.forwarder.close()


class DnsWorker:
    """Start: the resolvers, with the feed as descriptor. Open: the UDP socket and the listening TCP socket."""

    def __init__(self, node: NodeLine) -> None:
        self._node = node
        self._world: World | None = None
        self._served: Served[_Forwarding] = Served()

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(Start, self._start),
            Operation(Open, self._open),
            Operation(PolicyChange, self._change),
            Operation(Host, self._host),
            Operation(Close, self._served.shut),
        ]

    async def close(self) -> None:
        await self._served.close()
        if self._world is not None:
            self._world.feed.close()

    async def _start(self, message: Start, descriptors: Descriptors) -> None:
        feed = descriptors.take_socket() if descriptors else None
        resolvers = [Resolver(str(address), message.resolver_port) for address in message.resolvers]
        self._world = World(
            upstream=Upstream(resolvers, clock=time.monotonic),
            feed=Feed(feed, clock=time.time),
            learn=self._learn,
            limits=Limits.of_names(message.limits.names_per_s),
            host_addresses=frozenset(message.host_addresses),
            reach=tuple(message.reach),
            resolvers=tuple(message.resolvers),
        )

    async def _open(self, message: Open, descriptors: Descriptors) -> None:
        world = self._require_world()
        await self._served.forget(message.sandbox)
        datagrams, streams = descriptors.take_socket(), descriptors.take_socket()
        if (datagrams.type, streams.type) != (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            datagrams.close()
            streams.close()
            raise Breach("a UDP socket and a listening TCP socket are needed")
        forwarder = SandboxForwarder(message.sandbox, message.policy, world=world, exemptions=message.exemptions)
        forwarder.take_over((row.name, row.address, row.ttl_s) for row in message.learned)
        forwarding = _Forwarding(
            forwarder=forwarder,
            datagrams=DatagramListener(datagrams, forwarder),
            streams=StreamListener(streams, forwarder, most=world.limits.streams),
        )
        self._served.put(message.sandbox, forwarding)

    async def _change(self, message: PolicyChange, descriptors: Descriptors) -> Learned:
        served = self._served.get(message.sandbox)
        rows = served.forwarder.set_policy(message.policy) if served is not None else []
        return Learned(learned=[LearnedName(name=name, address=at, ttl_s=ttl_s) for name, at, ttl_s in rows])

    async def _host(self, message: Host, descriptors: Descriptors) -> None:
        world = self._require_world()
        world.host_addresses, world.reach = frozenset(message.host_addresses), tuple(message.reach)
        for served in self._served.all():
            served.forwarder.forget_answers()

    async def _learn(self, sandbox: str, name: str, addresses: Sequence[tuple[IPv4Address, int]]) -> None:
        rows = [LearnedAddress(address=address, ttl_s=ttl_s) for address, ttl_s in addresses]
        await self._node.ask(Learn(sandbox=sandbox, name=name, addresses=rows), answer=Done)

    def _require_world(self) -> World:
        if self._world is None:
            raise Breach("the worker was not started")
        return self._world


if __name__ == "__main__":
    # dnspython imports the class of a record type when the first such record comes.
    run_worker(DnsWorker, preload=dns.rdata.load_all_types)
