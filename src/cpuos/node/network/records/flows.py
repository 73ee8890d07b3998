"""Connections that are open, so that an end finds its beginning."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv4Address

__all__ = ["FlowKey", "OpenFlow", "OpenFlows"]

_MOST = 4096
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class FlowKey:
    protocol: str
    source_port: int | None
    address: IPv4Address
    port: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFlow:
    connection: int
    key: FlowKey
    name: str | None
    rule: str
    peek: str | None = None
    """The peek's own id, of those that it carries: it counts their bytes itself."""


class OpenFlows:
    """Of one sandbox."""

    def __init__(self) -> None:
        self._flows: OrderedDict[FlowKey, OpenFlow] = OrderedDict()
        self._peeks: dict[str, OpenFlow] = {}
        self._over: OrderedDict[FlowKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._flows)

    def __contains__(self, key: FlowKey) -> bool:
        return key in self._flows

    def all(self) -> list[OpenFlow]:
        return list(self._flows.values())

    def add(self, flow: OpenFlow) -> OpenFlow | None:
        """What has to be given up for it: an earlier one with these ends, or the oldest of too many."""
        replaced = self._take(flow.key)
        if replaced is None and len(self._flows) >= _MOST:
            replaced = self._take(next(iter(self._flows)))
        self._flows[flow.key] = flow
        if flow.peek is not None:
            self._peeks[flow.peek] = flow
        return replaced

    def end_by_peek(self, number: str) -> OpenFlow | None:
        flow = self._peeks.get(number)
        return self._take(flow.key) if flow is not None else None

    def end(self, key: FlowKey) -> OpenFlow | None:
        """The router may have changed the source port on the way out: then it is the only one that it can be."""
        found = self._take(key)
        if found is not None or key in self._over:
            return found
        alike = [
            flow
            for flow in self._flows.values()
            if flow.peek is None
            and (flow.key.protocol, flow.key.address, flow.key.port) == (key.protocol, key.address, key.port)
        ]
        return self._take(alike[0].key) if len(alike) == 1 else None

    def _take(self, key: FlowKey) -> OpenFlow | None:
        flow = self._flows.pop(key, None)
        if flow is not None:
            if flow.peek is not None:
                self._peeks.pop(flow.peek, None)
            # The kernel tells of its end too, later than whoever told first.
            self._over[key] = None
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
        return flow
