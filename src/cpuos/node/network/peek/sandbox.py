"""One sandbox's connections through the peek."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from cpuos.node.network.dialling import dial
from cpuos.node.network.judge import Judge, Judgement
from cpuos.node.network.peek.feed import PeekFeed
from cpuos.node.network.peek.gate import Gate, Refused
from cpuos.node.network.peek.relay import Allowance, Buffer, Relay, Share, reset
from cpuos.node.network.peek.stock import SocketStock
from cpuos.types.network import EffectivePolicy

__all__ = ["PeekLimits", "PeekWorld", "PeekedSandbox"]

_SO_ORIGINAL_DST = 80  # linux/netfilter_ipv4.h
_PORT_AND_ADDRESS = struct.Struct("!2xH4s8x")
_FIRST_PIECE = 16 << 10
_ACCEPTS_A_TURN = 64
_ACCEPT_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class PeekLimits:
    connections: int = 256
    """Of one sandbox at once."""
    name_s: float = 5.0
    """How long a guest may take to say for whom its connection is."""
    silence_s: float = 0.2
    """After so long the server may speak first, on ports where no name has to be read."""
    dial_s: float = 30.0
    reading_share: float = 0.1
    """Of the process' time, for reading what one sandbox sends: more of it waits."""
    reading_burst_s: float = 0.2


@dataclass(frozen=True, kw_only=True)
class PeekWorld:
    """What all sandboxes share."""

    feed: PeekFeed
    order_sockets: Callable[[str, int], Awaitable[None]]
    """Ask the node for so many sockets of a sandbox's router; they come in by `PeekedSandbox.stock`."""
    buffer: Buffer = field(default_factory=Buffer)
    limits: PeekLimits = field(default_factory=PeekLimits)


@dataclass(eq=False, kw_only=True)
class _Connection:
    guest: socket.socket
    address: IPv4Address
    port: int
    gate: Gate
    task: asyncio.Task[None] | None = None
    relay: Relay | None = None


class PeekedSandbox:
    """Accepts what the kernel redirects, until it is closed."""

    def __init__(self, sandbox: str, policy: EffectivePolicy, *, listener: socket.socket, world: PeekWorld) -> None:
        self._sandbox, self._world, self._listener = sandbox, world, listener
        self._loop = asyncio.get_running_loop()
        self._judge = Judge(policy)
        self._connections: set[_Connection] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._share = Share(world.buffer)
        self._allowance = Allowance(share=world.limits.reading_share, most_s=world.limits.reading_burst_s)
        self.stock = SocketStock(lambda count: world.order_sockets(sandbox, count))
        self._loop.add_reader(listener.fileno(), self._accept)
        if self._judge.names_matter:
            self.stock.fill()

    def set_policy(self, policy: EffectivePolicy) -> None:
        """Hold this from now on, and cut what it refuses."""
        self._judge = Judge(policy)
        for connection in list(self._connections):
            judgement = connection.gate.judge_again()
            if not judgement.allowed:
                self._cut(connection, Refused(judgement.rule, name=connection.gate.name))
        if self._judge.names_matter:
            self.stock.fill()

    async def close(self) -> None:
        """Reset everything and give all sockets back."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stock.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                guest, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is free: those that wait stay in the kernel's queue
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
                return
            self._begin(guest)

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _begin(self, guest: socket.socket) -> None:
        guest.setblocking(False)
        try:
            port, packed = _PORT_AND_ADDRESS.unpack(
                guest.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, _PORT_AND_ADDRESS.size)
            )
        except OSError:  # it came to the listener itself, past the rules
            reset(guest)
            return
        address = IPv4Address(packed)
        gate = Gate(address, port, judge=lambda: self._judge)
        connection = _Connection(guest=guest, address=address, port=port, gate=gate)
        most = self._world.limits.connections
        if len(self._connections) >= most:
            self._record_refusal(connection, Refused(f"limit: {most} connections by name at once"))
            reset(guest)
            return
        self._connections.add(connection)
        connection.task = self._loop.create_task(self._serve(connection))

    async def _serve(self, connection: _Connection) -> None:
        try:
            first = await self._read_first(connection)
            await self._carry(connection, first)
        except Refused as refusal:
            self._record_refusal(connection, refusal)
        except OSError:
            pass  # the guest went away
        except Exception:
            self._record_refusal(connection, Refused("the reader of host names failed", name=connection.gate.name))
            raise
        finally:
            self._connections.discard(connection)
            if connection.guest.fileno() >= 0:
                reset(connection.guest)

    async def _read_first(self, connection: _Connection) -> bytes:
        """Until a name is read and allowed, or none has to be; what then goes on to the server."""
        gate, limits, passed = connection.gate, self._world.limits, bytearray()
        try:
            async with asyncio.timeout(limits.name_s if gate.must_name else limits.silence_s) as patience:
                while not gate.is_decided:
                    data = await self._loop.sock_recv(connection.guest, _FIRST_PIECE)
                    passed += gate.feed(data) if data else gate.end()
                    if not data:
                        break
                    if not gate.must_name and not gate.is_decided:
                        patience.reschedule(self._loop.time() + limits.name_s)
        except TimeoutError:
            if gate.must_name or gate.has_begun:
                raise Refused("no host name can be read: it did not come in time") from None
        except OSError:
            raise Refused("no host name can be read: the connection was broken off") from None
        if not gate.is_decided:
            gate.pass_unread()
        return bytes(passed)

    async def _carry(self, connection: _Connection, first: bytes) -> None:
        feed, gate = self._world.feed, connection.gate
        judgement = self._judgement(connection)
        try:
            server = await self.stock.take()
        except TimeoutError:
            raise Refused("limit: the node gave no socket in time", name=gate.name) from None
        problem: Exception | None = None
        try:
            async with asyncio.timeout(self._world.limits.dial_s):
                await dial(server, (str(connection.address), connection.port))
        except (OSError, TimeoutError) as error:
            problem = error
        except BaseException:
            server.close()
            raise
        source_port = None
        with contextlib.suppress(OSError):
            source_port = server.getsockname()[1] or None
        place = (self._sandbox, connection.address, connection.port)
        number = feed.opened(*place, name=gate.name, rule=judgement.rule, source_port=source_port)
        if problem is not None:
            server.close()
            feed.closed(self._sandbox, number, sent=0, received=0)
            return
        connection.relay = relay = Relay(
            connection.guest,
            server,
            gate=gate,
            share=self._share,
            allowance=self._allowance,
            on_refused=lambda refusal: self._record_refusal(connection, refusal),
        )
        try:
            await relay.run(first)
        finally:
            feed.closed(self._sandbox, number, sent=relay.sent, received=relay.received)

    def _judgement(self, connection: _Connection) -> Judgement:
        """The policy may have changed while the name was read."""
        judgement = connection.gate.judge_again()
        if not judgement.allowed:
            raise Refused(judgement.rule, name=connection.gate.name)
        return judgement

    def _cut(self, connection: _Connection, refusal: Refused) -> None:
        if connection.relay is not None:
            connection.relay.break_off(refusal)
        elif connection.task is not None:
            self._record_refusal(connection, refusal)
            connection.task.cancel()

    def _record_refusal(self, connection: _Connection, refusal: Refused) -> None:
        self._world.feed.refused_connection(
            self._sandbox, connection.address, connection.port, name=refusal.name, rule=refusal.rule
        )
