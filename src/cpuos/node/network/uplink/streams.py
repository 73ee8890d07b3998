"""TCP through the uplink.

A guest's SYN comes here before anything has answered it. The far side is dialled first; then the SYN is sent back into
the hub, where it meets a listening socket of this process, or a closed port. So a program hears of a refusal as from
the far side itself, and the kernel speaks TCP both ways; between the two connections bytes are copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv4Address

from cpuos.node.network.dialling import dial
from cpuos.node.network.peek.relay import Buffer, Relay, Share, reset
from cpuos.node.network.uplink.guard import Guard
from cpuos.node.network.uplink.packets import ACCEPTED, REFUSED, Packet, tagged

__all__ = ["Streams"]

DIAL_S = 75.0
"""As long as a guest's own kernel tries."""
ACCEPT_S = 10.0
"""A guest that has gone meanwhile does not come any more."""
_SO_ORIGINAL_DST = 80  # linux/netfilter_ipv4.h
_PORT_AND_ADDRESS = struct.Struct("!2xH4s8x")
_ACCEPTS_A_TURN = 64
_PAUSE_S = 0.1


class Streams:
    """`send` writes a packet into the hub; `most` is how many one slot has at once."""

    def __init__(self, listener: socket.socket, *, send: Callable[[bytes], None], guard: Guard, most: int) -> None:
        self._listener, self._send, self._guard, self._most = listener, send, guard, most
        self._loop = asyncio.get_running_loop()
        self._buffer = Buffer()
        self._shares: dict[bytes, Share] = {}
        self._counts: Counter[bytes] = Counter()
        self._dialling: dict[bytes, asyncio.Task[None]] = {}
        self._dialled: dict[bytes, tuple[Packet, socket.socket, asyncio.TimerHandle]] = {}
        self._relays: dict[bytes, tuple[Relay, asyncio.Task[None]]] = {}
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def __len__(self) -> int:
        return len(self._dialling) + len(self._dialled) + len(self._relays)

    def take(self, packet: Packet) -> None:
        """A SYN."""
        if packet.key in self._dialling:
            return  # said again, since nothing has answered yet
        if packet.key in self._dialled:
            self._send(tagged(self._dialled[packet.key][0], ACCEPTED))
            return
        if packet.key in self._relays:
            self._break_off(packet.key)  # its ends are used anew
        allowed = self._guard.allows(packet.address, protocol="tcp", port=packet.port)
        if not allowed or self._counts[packet.source] >= self._most:
            self._send(tagged(packet, REFUSED))
            return
        self._counts[packet.source] += 1
        self._dialling[packet.key] = self._loop.create_task(self._dial(packet))

    def end(self, source: bytes, keys: set[bytes] | None) -> None:
        """Break off what comes from this slot, or of it what has these keys."""
        for key in [key for key in (*self._dialling, *self._dialled, *self._relays) if key[:4] == source]:
            if keys is None or key in keys:
                self._break_off(key)
        if keys is None:
            self._shares.pop(source, None)

    async def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        tasks = [*self._dialling.values(), *(task for _, task in self._relays.values())]
        for key in (*self._dialling, *self._dialled, *self._relays):
            self._break_off(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _dial(self, packet: Packet) -> None:
        server: socket.socket | None = None
        try:
            server = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            async with asyncio.timeout(DIAL_S):
                await dial(server, (str(packet.address), packet.port))
        except (OSError, TimeoutError):
            self._forget(packet, server)
            self._send(tagged(packet, REFUSED))
            return
        except BaseException:
            self._forget(packet, server)
            raise
        finally:
            del self._dialling[packet.key]
        timer = self._loop.call_later(ACCEPT_S, self._break_off, packet.key)
        self._dialled[packet.key] = (packet, server, timer)
        self._send(tagged(packet, ACCEPTED))

    def _forget(self, packet: Packet, server: socket.socket | None) -> None:
        self._uncount(packet.source)
        if server is not None:
            server.close()

    def _uncount(self, source: bytes) -> None:
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]

    def _break_off(self, key: bytes) -> None:
        if key in self._dialling:
            self._dialling[key].cancel()
        if key in self._dialled:
            _, server, timer = self._dialled.pop(key)
            timer.cancel()
            reset(server)
            self._uncount(key[:4])
        if key in self._relays:
            self._relays[key][0].break_off()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                guest, (source, source_port) = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is free: those that wait stay in the kernel's queue
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(_PAUSE_S, self._accept_again)
                return
            self._begin(guest, IPv4Address(source).packed, source_port)

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _begin(self, guest: socket.socket, source: bytes, source_port: int) -> None:
        guest.setblocking(False)
        with contextlib.suppress(OSError):  # it came to the listener itself, past the rules
            raw = guest.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, _PORT_AND_ADDRESS.size)
            port, address = _PORT_AND_ADDRESS.unpack(raw)
            key = source + address + struct.pack("!HH", source_port, port)
            dialled = self._dialled.pop(key, None)
            if dialled is not None and key not in self._relays:
                dialled[2].cancel()
                share = self._shares.setdefault(source, Share(self._buffer))
                relay = Relay(guest, dialled[1], share=share)
                task = self._loop.create_task(self._carry(key, relay))
                self._relays[key] = (relay, task)
                return
            if dialled is not None:
                dialled[2].cancel()
                reset(dialled[1])
                self._uncount(source)
        reset(guest)

    async def _carry(self, key: bytes, relay: Relay) -> None:
        try:
            await relay.run(b"")
        finally:
            del self._relays[key]
            self._uncount(key[:4])
