"""Scheduler of one machine: reservations in memory, rebuilt from the records at start."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from cpuos.errors import CpuosError, Unavailable
from cpuos.node.client import NodeClient
from cpuos.scheduler.base import Capacity, CapacityRules, Demand, NodeView, Placement, ReadyNews
from cpuos.scheduler.placement import check_room, place, total_capacity
from cpuos.scheduler.ready import ReadyStock
from cpuos.types.node import NodeFacts, PoolFacts

__all__ = ["LocalScheduler"]


READY_WAIT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class _Reservation:
    node: str
    amount: Capacity
    committed: bool


class LocalScheduler:
    """One node. Reserving never awaits, so it is atomic in the server's event loop."""

    def __init__(self, node: NodeClient, rules: CapacityRules) -> None:
        self._node = node
        self._rules = rules
        self._facts: NodeFacts | None = None
        self._reachable = False
        self._reservations: dict[str, _Reservation] = {}
        self._reserved = Capacity()  # their sum
        self._refreshing: asyncio.Task[NodeFacts] | None = None
        self._ready = ReadyStock()

    async def refresh(self) -> None:
        """Ask the node for its facts; callers at the same time share one question."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._node.facts())
        try:
            self._facts = await asyncio.shield(self._refreshing)
        except CpuosError:
            self._reachable = False
            raise
        self._reachable = True

    def reserve(self, sandbox_id: str, demand: Demand) -> Placement:
        if self._facts is not None and not self._reachable:
            raise Unavailable(
                "cannot create sandbox: the node cannot be reached",
                f"node {self._facts.node} does not answer",
                code="node_unavailable",
                hint="cpuos status",
            )
        demand = replace(demand, allow_emulated=demand.allow_emulated or self._rules.allow_emulated)
        placement = place(self.nodes(), demand)
        placement = replace(placement, ready=self._ready.pick(demand, placement, held=self._reservations))
        amount = Capacity.of(demand)
        self._reservations[placement.ready or sandbox_id] = _Reservation(
            node=placement.node, amount=amount, committed=False
        )
        self._reserved = self._reserved.plus(amount)
        return placement

    def commit(self, sandbox_id: str) -> None:
        self._reservations[sandbox_id] = replace(self._reservations[sandbox_id], committed=True)

    def release(self, sandbox_id: str) -> None:
        held = self._reservations.pop(sandbox_id, None)
        if held is not None:
            self._reserved = self._reserved.minus(held.amount)
            if not held.committed:
                self._ready.put_back(sandbox_id)

    def hold(self, key: str, *, node: str, amount: Capacity, action: str) -> None:
        held = self._reservations.get(key)
        more = amount.minus(held.amount if held is not None else Capacity())
        for view in self.nodes():
            check_room(view, more, action=action)
        self._reservations[key] = _Reservation(node=node, amount=amount, committed=True)
        self._reserved = self._reserved.plus(more)

    def park(self, key: str) -> None:
        held = self._reservations.get(key)
        if held is not None:
            self._reservations[key] = replace(held, amount=held.amount.parked)
            self._reserved = self._reserved.minus(held.amount).plus(held.amount.parked)

    def adopt(self, held: Mapping[str, tuple[str, Capacity]]) -> None:
        pending = {key: one for key, one in self._reservations.items() if not one.committed}
        recorded = {key: _Reservation(node=node, amount=amount, committed=True) for key, (node, amount) in held.items()}
        self._reservations = {**pending, **recorded}
        self._reserved = reduce(Capacity.plus, (one.amount for one in self._reservations.values()), Capacity())

    async def follow_ready(self) -> ReadyNews:
        try:
            facts = await self._node.pool(self._ready.seq, wait_s=READY_WAIT_S)
        except CpuosError:
            self._ready.note(PoolFacts())  # whatever it had ready, another daemon has to tell of it
            raise
        return self._ready.note(facts)

    def nodes(self) -> Sequence[NodeView]:
        if self._facts is None:
            return ()
        return (
            NodeView(
                facts=self._facts,
                total=total_capacity(self._facts, self._rules),
                reserved=self._reserved,
            ),
        )

    @property
    def reachable(self) -> bool:
        return self._reachable

    def client(self, node: str) -> NodeClient:
        return self._node
