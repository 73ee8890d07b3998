"""The node's side of the uplink in user space: device and listening socket of the hub, and the process serving them.

Device and socket are the daemon's, so that what sandboxes send while one process follows another waits for it. With the
daemon they go, and with them every connection: then nothing leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address

import structlog

from cpuos.errors import PlatformError
from cpuos.node.network.conntrack import Flow
from cpuos.node.network.hub import Hub
from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.plan import BlockPlan
from cpuos.node.network.workers.channel import Message
from cpuos.node.network.workers.messages import EndedFlow, EndFlows, Host, Start
from cpuos.node.network.workers.supervisor import StartCall, Worker
from cpuos.types.blocked import Exemption

__all__ = ["UserUplink"]

log = structlog.get_logger("cpuos.node.network")

DOWN_AFTER_S = 5.0
"""A process that is away for so long is no way out any more: what sandboxes send is refused instead of kept waiting."""
FIRST_START_S = 15.0
"""How long the first one may take to come up."""
_DESCRIPTORS = 1 << 16
"""It holds two for each connection."""
_LAST_PAUSE_S = 10.0


class UserUplink:
    """Started and ended with the daemon."""

    def __init__(self, hub: Hub, *, exemptions: Sequence[Exemption], limits: NetworkLimits) -> None:
        self._hub, self._exemptions, self._limits = hub, exemptions, limits
        self._addresses: tuple[IPv4Address, ...] = ()
        self._device = -1
        self._listener: socket.socket | None = None
        self._served_at = math.inf
        self._starting: asyncio.Task[None] | None = None
        self.worker = Worker("uplink", start=self._start_call, descriptors=_DESCRIPTORS)

    async def start(self, plan: BlockPlan, addresses: Sequence[IPv4Address]) -> None:
        """Raises OSError where there can be no such device."""
        self._addresses = tuple(addresses)
        self._device, self._listener = await asyncio.to_thread(self._hub.open_user_uplink, plan)
        self._served_at = time.monotonic() + FIRST_START_S - DOWN_AFTER_S
        self._starting = asyncio.create_task(self._start(), name="cpuos-uplink")

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self.worker.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._device >= 0:
            os.close(self._device)
            self._device = -1

    @property
    def is_down(self) -> bool:
        """Not before it was started, or had the time to come up: what is sent then waits for it."""
        if self.worker.is_ready:
            self._served_at = max(self._served_at, time.monotonic())
        return time.monotonic() - self._served_at > DOWN_AFTER_S

    async def set_host_addresses(self, addresses: Sequence[IPv4Address]) -> None:
        self._addresses = tuple(addresses)
        await self._tell(Host(host_addresses=list(addresses)))

    async def end(self, slot: IPv4Address, flows: Collection[Flow] | None = None) -> None:
        """Break off a slot's connections, or those of them that its router cut."""
        if flows is None:
            await self._tell(EndFlows(slot_address=slot))
            return
        ended = [
            EndedFlow(protocol=flow.protocol, source_port=flow.mapped_port, address=flow.address, port=flow.port)
            for flow in flows
            if flow.protocol in ("tcp", "udp") and flow.mapped_port is not None and flow.port is not None
        ]
        if ended:
            await self._tell(EndFlows(slot_address=slot, flows=ended))

    async def _start(self) -> None:
        pause = 0.1
        while True:
            try:
                await self.worker.start()
                return
            except PlatformError as problem:
                log.error("uplink does not start", why=problem.why, again_in_s=pause)
                await self.worker.close()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE_S)

    def _start_call(self) -> StartCall:
        assert self._listener is not None
        message = Start(host_addresses=list(self._addresses), limits=self._limits, exemptions=list(self._exemptions))
        return StartCall(message=message, descriptors=[self._listener.fileno(), self._device])

    async def _tell(self, message: Message) -> None:
        with contextlib.suppress(PlatformError):  # one that begins anew has no connections, and is told at its start
            await self.worker.request(message)
