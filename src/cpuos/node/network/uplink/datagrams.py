"""UDP and echo requests through the uplink: for each pair of ends a connected socket of its own, for as long as it is
used. What the far side sends back, or refuses, is written into the hub as if it came from there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cpuos.node.network.uplink.guard import Guard
from cpuos.node.network.uplink.packets import (
    PORT_UNREACHABLE,
    PROHIBITED,
    Packet,
    echo_packet,
    udp_packet,
    unreachable,
)

__all__ = ["Datagrams"]

IDLE_S = 120.0
"""As the kernel's own table keeps a flow that was answered."""
_SWEEP_S = 10.0
_TURN = 16
_MOST_BYTES = 65535


@dataclass(kw_only=True)
class _Flow:
    packet: Packet
    """The newest from the guest: answers and errors are to it."""
    end: socket.socket
    used: float


class Datagrams:
    """`most`: flows of one slot at once; more push out its oldest."""

    def __init__(self, *, send: Callable[[bytes], None], guard: Guard, most: int) -> None:
        self._send, self._guard, self._most = send, guard, most
        self._loop = asyncio.get_running_loop()
        self._slots: dict[bytes, OrderedDict[tuple[int, bytes], _Flow]] = {}
        self._sweeper = self._loop.create_task(self._sweep())

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def take(self, packet: Packet) -> None:
        flow = self._find(packet)
        if flow is None:
            return
        try:
            flow.end.send(packet.payload)
        except (BlockingIOError, InterruptedError):
            return  # a datagram may be lost
        except OSError as problem:
            self._failed(flow, problem)

    def end(self, source: bytes, keys: set[bytes] | None) -> None:
        """Close what comes from this slot, or of it what has these keys."""
        for number, key in list(self._slots.get(source, ())):
            if keys is None or key in keys:
                self._close(source, (number, key))

    async def close(self) -> None:
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        for source in list(self._slots):
            self.end(source, None)

    def _find(self, packet: Packet) -> _Flow | None:
        flows = self._slots.setdefault(packet.source, OrderedDict())
        key = (packet.protocol, packet.key)
        flow = flows.get(key)
        if flow is not None:
            flow.packet, flow.used = packet, time.monotonic()
            flows.move_to_end(key)
            return flow
        is_echo = packet.protocol == socket.IPPROTO_ICMP
        end: socket.socket | None = None
        try:
            if self._guard.allows(
                packet.address, protocol="icmp" if is_echo else "udp", port=None if is_echo else packet.port
            ):
                end = _connect(packet)
        except OSError:
            end = None
        if end is None:
            self._send(unreachable(packet, PROHIBITED if is_echo else PORT_UNREACHABLE))
            if not flows:
                del self._slots[packet.source]
            return None
        if len(flows) >= self._most:
            self._close(packet.source, next(iter(flows)))
            flows = self._slots.setdefault(packet.source, flows)
        flow = flows[key] = _Flow(packet=packet, end=end, used=time.monotonic())
        self._loop.add_reader(end.fileno(), self._read, flow)
        return flow

    def _read(self, flow: _Flow) -> None:
        for _ in range(_TURN):
            try:
                data = flow.end.recv(_MOST_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as problem:
                self._failed(flow, problem)
                return
            flow.used = time.monotonic()
            self._send((echo_packet if flow.packet.protocol == socket.IPPROTO_ICMP else udp_packet)(flow.packet, data))

    def _failed(self, flow: _Flow, problem: OSError) -> None:
        if isinstance(problem, ConnectionRefusedError) and flow.packet.protocol == socket.IPPROTO_UDP:
            self._send(unreachable(flow.packet, PORT_UNREACHABLE))

    def _close(self, source: bytes, key: tuple[int, bytes]) -> None:
        flow = self._slots[source].pop(key)
        if not self._slots[source]:
            del self._slots[source]
        self._loop.remove_reader(flow.end.fileno())
        flow.end.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """Close what nobody has used for long."""
        for source, flows in list(self._slots.items()):
            for key in [key for key, flow in flows.items() if now - flow.used > IDLE_S]:
                self._close(source, key)


def _connect(packet: Packet) -> socket.socket:
    """Raises OSError, also where this user may send no echo requests (net.ipv4.ping_group_range)."""
    protocol = packet.protocol if packet.protocol == socket.IPPROTO_ICMP else 0
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    with contextlib.ExitStack() as stack:
        end = stack.enter_context(socket.socket(socket.AF_INET, kind, protocol))
        end.connect((str(packet.address), packet.port))
        stack.pop_all()
    return end
