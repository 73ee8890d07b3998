"""What a worker knows again after a restart: from the state beside the journal, and the records after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any

from cpuos.node.network.records.flows import FlowKey, OpenFlow
from cpuos.node.network.records.journal import RecordsJournal

__all__ = ["Recovered", "Totals", "kept_state", "recover"]

_REFUSALS = 512
_FAR = 1_000_000


@dataclass
class Totals:
    """Of what the router counts: what was written down, and how much was told as missing."""

    allowed: int = 0
    refused: int = 0
    missing: int = 0


@dataclass
class Recovered:
    connection: int = 0
    totals: dict[str, Totals] = field(default_factory=dict)
    flows: dict[str, dict[int, OpenFlow]] = field(default_factory=dict)
    refusals: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def kept_state(
    connection: int, totals: Mapping[str, Totals], flows: Iterable[tuple[str, Iterable[OpenFlow]]]
) -> dict[str, Any]:
    return {
        "connection": connection,
        "totals": {name: [one.allowed, one.refused, one.missing] for name, one in totals.items()},
        "open": [[sandbox, *_flat(flow)] for sandbox, those in flows for flow in those],
    }


def recover(journal: RecordsJournal) -> Recovered:
    """What cannot be read again is not known; numbers of connections are never used twice."""
    try:
        return _recover(journal)
    except (KeyError, TypeError, ValueError):
        return Recovered(connection=journal.last + _FAR)


def _recover(journal: RecordsJournal) -> Recovered:
    state, found = journal.kept_state, Recovered()
    found.connection = int(state.get("connection", 0))
    found.totals = {name: Totals(*numbers) for name, numbers in state.get("totals", {}).items()}
    for sandbox, *flat in state.get("open", []):
        flow = _unflat(flat)
        found.flows.setdefault(sandbox, {})[flow.connection] = flow
    for entry in journal.recent():
        found.connection = max(found.connection, entry["connection"])
        if entry["event"] == "refused":
            shown = {name: value for name, value in entry.items() if not name.startswith("_")}
            found.refusals.setdefault(entry["sandbox"], []).append(shown)
        if entry["seq"] > state["seq"]:
            _replay(found, entry)
    found.refusals = {name: entries[-_REFUSALS:] for name, entries in found.refusals.items()}
    return found


def _replay(found: Recovered, entry: dict[str, Any]) -> None:
    sandbox = entry["sandbox"]
    totals = found.totals.setdefault(sandbox, Totals())
    if entry["event"] == "open":
        totals.allowed += entry["_logged"]
        key = FlowKey(entry["kind"], entry["_port"], IPv4Address(entry["address"]), entry["port"])
        flow = OpenFlow(
            connection=entry["connection"], key=key, name=entry["name"], rule=entry["rule"], peek=entry["_peek"]
        )
        found.flows.setdefault(sandbox, {})[flow.connection] = flow
    elif entry["event"] == "closed":
        found.flows.get(sandbox, {}).pop(entry["connection"], None)
    elif entry["event"] == "refused":
        totals.refused += entry["_logged"]
    else:
        totals.missing += entry.get("_missing", 0)


def _flat(flow: OpenFlow) -> list[Any]:
    key = flow.key
    place = [key.protocol, key.source_port, str(key.address), key.port]
    return [flow.connection, *place, flow.name, flow.rule, flow.peek]


def _unflat(flat: list[Any]) -> OpenFlow:
    connection, protocol, source_port, address, port, name, rule, peek = flat
    key = FlowKey(protocol, source_port, IPv4Address(address), port)
    return OpenFlow(connection=connection, key=key, name=name, rule=rule, peek=peek)
