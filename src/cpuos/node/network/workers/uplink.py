"""The uplink's process: an ordinary program of the host, through which all sandboxes of the instance reach the outside.

Start: the hub's device and a socket that listens in the hub, as descriptors. It has no rights, and no more of the host
than a user without any has; what the rules of routers and hub let through, and its own guard, it dials.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any

from cpuos.node.network.uplink.datagrams import Datagrams
from cpuos.node.network.uplink.guard import Guard
from cpuos.node.network.uplink.packets import parse_packet
from cpuos.node.network.uplink.streams import Streams
from cpuos.node.network.workers.base import NodeLine, run_worker
from cpuos.node.network.workers.calls import Operation
from cpuos.node.network.workers.channel import Breach, Descriptors
from cpuos.node.network.workers.messages import EndFlows, Host, Start

__all__ = ["UplinkWorker"]

_TURN = 64
_MOST_BYTES = 65536


class UplinkWorker:
    def __init__(self, node: NodeLine) -> None:
        self._device = -1
        self._guard: Guard | None = None

    def operations(self) -> list[Operation[Any]]:
        return [Operation(Start, self._start), Operation(Host, self._host), Operation(EndFlows, self._end)]

    async def close(self) -> None:
        if self._guard is not None:
            asyncio.get_running_loop().remove_reader(self._device)
            await self._streams.close()
            await self._datagrams.close()
            self._guard.close()
            os.close(self._device)

    async def _start(self, message: Start, descriptors: Descriptors) -> None:
        if self._guard is not None or len(descriptors) != 2:
            raise Breach("a device and a listening socket are needed, once")
        listener, self._device = descriptors.take_socket(), descriptors.take()
        os.set_blocking(self._device, False)
        most = message.limits.concurrent_connections
        self._guard = Guard(exemptions=message.exemptions, host_addresses=message.host_addresses)
        self._streams = Streams(listener, send=self._send, guard=self._guard, most=most)
        self._datagrams = Datagrams(send=self._send, guard=self._guard, most=most)
        asyncio.get_running_loop().add_reader(self._device, self._read)

    async def _host(self, message: Host, descriptors: Descriptors) -> None:
        if self._guard is not None:
            self._guard.host_addresses = frozenset(message.host_addresses)

    async def _end(self, message: EndFlows, descriptors: Descriptors) -> None:
        if self._guard is None:
            return
        source = message.slot_address.packed
        if message.flows is None:
            self._streams.end(source, None)
            self._datagrams.end(source, None)
            return
        keys: dict[str, set[bytes]] = {"tcp": set(), "udp": set()}
        for flow in message.flows:
            ports = struct.pack("!HH", flow.source_port, flow.port)
            keys[flow.protocol].add(source + flow.address.packed + ports)
        self._streams.end(source, keys["tcp"])
        self._datagrams.end(source, keys["udp"])

    def _read(self) -> None:
        for _ in range(_TURN):
            try:
                data = os.read(self._device, _MOST_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            packet = parse_packet(data)
            if packet is None:
                continue
            if packet.protocol == socket.IPPROTO_TCP:
                self._streams.take(packet)
            else:
                self._datagrams.take(packet)

    def _send(self, data: bytes) -> None:
        if data:
            try:
                os.write(self._device, data)
            except (BlockingIOError, InterruptedError):
                return  # a packet may be lost


if __name__ == "__main__":
    run_worker(UplinkWorker)
