"""A slot in use: its router, the policy that holds in it, and what its guest was told of names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from pathlib import Path

from cpuos.errors import PlatformError
from cpuos.node.network.conntrack import Flow
from cpuos.node.network.judge import Judge
from cpuos.node.network.plan import SlotPlan
from cpuos.node.network.policy_rules import NamedAddress
from cpuos.node.network.router import Counters, Router
from cpuos.node.network.surroundings import Surroundings
from cpuos.node.network.told import ToldNames
from cpuos.types.network import EffectivePolicy

__all__ = ["TakenSlot"]


class TakenSlot:
    """One for each sandbox of this daemon. Its methods take what blocks into threads."""

    def __init__(self, *, folder: Path, plan: SlotPlan, router: Router) -> None:
        self.folder = folder
        self.plan = plan
        self.policy: EffectivePolicy | None = None
        self.is_closed = False
        """It is being taken away."""
        self.lock = asyncio.Lock()
        """Guards all of these and the rules: what the forwarder learns goes by the policy it was learned under."""
        self.opened: dict[str, int] = {}
        """By worker: which of its processes has this slot."""
        self.is_found = False
        """An earlier daemon had it."""
        self.counted_before: Counters | None = None
        """What the rules of an earlier daemon had counted, until the records worker has heard of it."""
        self.told = ToldNames(folder)
        self._router = router

    async def apply(self, policy: EffectivePolicy, *, learned: Collection[NamedAddress] = (), base: str = "") -> None:
        """With all that the guest was told of names, and `learned` beside it: a forwarder that has just begun may not
        know yet what the one before it said. `base`: base rules that must lie under it, where those of an earlier
        daemon may."""
        self.told.add(learned)
        told = self.told.all()

        def work() -> None:
            self._router.apply(Judge(policy), learned=told, base=base)
            self.told.save_all()

        await asyncio.to_thread(work)
        self.policy = policy

    async def cut(self) -> list[Flow]:
        """Take out what is open and may not be any more."""
        assert self.policy is not None
        names = self.told.by_address()
        return await asyncio.to_thread(self._router.cut, Judge(self.policy), lambda address: names.get(address, ()))

    async def learn(self, learned: Collection[NamedAddress]) -> None:
        async with self.lock:
            if self.is_closed:
                raise PlatformError("cannot open an address for its name", "its slot is being taken away")
            self.told.add(learned)
            await asyncio.to_thread(self._learn, learned)

    def _learn(self, learned: Collection[NamedAddress]) -> None:
        self._router.learn(learned)
        self.told.save(learned)

    async def set_surroundings(self, surroundings: Surroundings) -> None:
        async with self.lock:
            await asyncio.to_thread(self._router.set_surroundings, surroundings)

    async def peek_sockets(self, count: int) -> list[socket.socket]:
        return await asyncio.to_thread(self._router.peek_sockets, count)

    async def counters(self) -> Counters:
        return await asyncio.to_thread(self._router.counters)

    async def close(self) -> None:
        """Let go of the namespace: its rules hold on without this daemon."""
        await asyncio.to_thread(self._router.close)
