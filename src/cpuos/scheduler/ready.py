"""The ready sandboxes of a node, as it told them last, and which of them this server has given away since."""

from __future__ import annotations

from collections.abc import Container

from cpuos.scheduler.base import Demand, Placement, ReadyNews
from cpuos.types.node import PoolFacts, ReadySandbox

__all__ = ["ReadyStock"]


class ReadyStock:
    """On one loop: of two callers for the last one, one gets it."""

    def __init__(self) -> None:
        self._facts = PoolFacts()
        self._picked: set[str] = set()
        """Given away, and perhaps not yet known to be so at the node."""

    @property
    def seq(self) -> int:
        return self._facts.seq

    def note(self, facts: PoolFacts) -> ReadyNews:
        """The node's news; without any, nothing is ready."""
        self._facts = facts
        ready = frozenset(one.id for one in facts.ready)
        taken = frozenset(self._picked - ready)
        self._picked -= taken
        return ReadyNews(ready=ready, taken=taken)

    def pick(self, demand: Demand, placement: Placement, *, held: Container[str] = ()) -> str | None:
        """The id of one that will do, and that is not `held` already; nobody else gets it."""
        if not demand.for_anyone:
            return None
        for ready in self._facts.ready:
            if ready.id not in self._picked and ready.id not in held and _fits(ready, demand, placement):
                self._picked.add(ready.id)
                return ready.id
        return None

    def put_back(self, sandbox_id: str) -> None:
        """Nobody was given it after all."""
        self._picked.discard(sandbox_id)


def _fits(ready: ReadySandbox, demand: Demand, placement: Placement) -> bool:
    # Of a snapshot the template's image is the one of its own sandbox, whatever the name means by now.
    same = ready.template_digest == placement.template_digest or demand.snapshot is not None
    return (
        same
        and ready.snapshot == demand.snapshot
        and ready.template == demand.template
        and ready.runtime == placement.runtime
        and ready.cpu == demand.cpu
        and ready.memory_mib == demand.memory_mib
        and ready.disk_mib == demand.disk_mib
        and ready.max_processes == demand.max_processes
    )
