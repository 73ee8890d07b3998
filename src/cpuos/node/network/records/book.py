"""What is known of all sandboxes' connections, and what is written down of it. Pure but for the journal.

log of a router ("a 7", "d 7")  ── opened, refused       ends of the hub  ── closed, with bytes
forwarder  ── names, refused names                       peek  ── opened, closed, refused
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from cpuos.node.network.conntrack import Flow
from cpuos.node.network.records.floods import Floods
from cpuos.node.network.records.flows import FlowKey, OpenFlow, OpenFlows
from cpuos.node.network.records.gathering import Gathered, Gathering, Refusal
from cpuos.node.network.records.journal import RecordsJournal
from cpuos.node.network.records.nflog import LoggedPacket
from cpuos.node.network.records.recovery import Totals, kept_state, recover
from cpuos.node.network.records.reports import PeekClosed, PeekOpened, Refused, Report, Resolved
from cpuos.node.network.records.words import Words
from cpuos.node.network.surroundings import EVERYWHERE
from cpuos.types.blocked import Exemption
from cpuos.types.network import EffectivePolicy

__all__ = ["Book"]

LATE_S = 60.0
"""How long after a sandbox's end the kernel may still tell of its connections."""
_MOST_ADDRESSES = 4096
_NAMES_EACH = 4
_REFUSALS = 512
_ENDED = 1000
LOST = "the records of these were lost"


@dataclass(eq=False, kw_only=True)
class _Sandbox:
    id: str
    words: Words
    flows: OpenFlows
    address: IPv4Address | None = None
    """Of its slot: the source of its connections in the hub."""
    gathering: Gathering = field(default_factory=Gathering)
    names: OrderedDict[IPv4Address, list[str]] = field(default_factory=OrderedDict)
    refusals: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_REFUSALS))
    dropped: int = 0
    """Number of the newest refusal that is no longer remembered."""


@dataclass
class _Late:
    """A sandbox that has ended, or of which an earlier process knew."""

    until: float
    address: IPv4Address | None
    flows: OpenFlows


class Book:
    def __init__(self, make_journal: Callable[[Callable[[], dict[str, Any]]], RecordsJournal], *, now: float) -> None:
        self.host_addresses: Collection[IPv4Address] = ()
        self.reach: Collection[IPv4Network] = EVERYWHERE
        self.floods = Floods()
        self._sandboxes: dict[str, _Sandbox] = {}
        self._by_address: dict[IPv4Address, _Sandbox] = {}
        self._totals: OrderedDict[str, Totals] = OrderedDict()
        self._late: dict[str, _Late] = {}
        self._begun = now
        self._connection = 0
        self.journal = make_journal(self._state)
        recovered = recover(self.journal)
        self._connection, self._earlier_refusals = recovered.connection, recovered.refusals
        self._totals.update(recovered.totals)
        for sandbox, flows in recovered.flows.items():
            late = self._late[sandbox] = _Late(now + LATE_S, None, OpenFlows())
            for flow in flows.values():
                late.flows.add(flow)

    # which sandboxes there are

    def open(
        self,
        sandbox: str,
        policy: EffectivePolicy,
        *,
        exemptions: Collection[Exemption],
        address: IPv4Address | None,
        is_new: bool = False,
    ) -> None:
        """One that is known already goes on. `is_new`: by a router that has counted nothing yet."""
        if is_new and self._totals.pop(sandbox, None) is not None:
            self.journal.keep_state()
        known = self._sandboxes.get(sandbox)
        if known is None:
            late = self._late.pop(sandbox, None)
            known = self._sandboxes[sandbox] = _Sandbox(
                id=sandbox,
                words=Words(policy, exemptions=exemptions),
                flows=late.flows if late is not None else OpenFlows(),
            )
            known.refusals.extend(self._earlier_refusals.pop(sandbox, []))
        known.words.set_policy(policy)
        if known.address is not None:
            self._by_address.pop(known.address, None)
        known.address = address
        if address is not None:
            self._by_address[address] = known

    def set_policy(self, sandbox: str, policy: EffectivePolicy) -> None:
        if sandbox in self._sandboxes:
            self._sandboxes[sandbox].words.set_policy(policy)

    def close(self, sandbox: str, *, now: float) -> None:
        """What it has open is ended by the kernel in a while, or else without a count of bytes."""
        known = self._sandboxes.pop(sandbox, None)
        if known is None:
            return
        self.floods.forget(sandbox)
        self._write_refusals(known, known.gathering.take())
        if known.address is not None:
            self._by_address.pop(known.address, None)
        self._late[sandbox] = _Late(now + LATE_S, known.address, known.flows)

    def learn(self, sandbox: str, name: str, address: IPv4Address) -> None:
        """What its guest was told, before this process began."""
        if sandbox in self._sandboxes:
            self._learn(self._sandboxes[sandbox], name, address)

    # what comes in

    def log_packet(self, sandbox: str, packet: LoggedPacket, *, now: float) -> None:
        known = self._sandboxes.get(sandbox)
        if known is None:
            return
        letter, _, rest = packet.prefix.partition(" ")
        number, _, word = rest.partition(" ")
        version = int(number) if number.isdecimal() and len(number) < 16 else None
        names = known.names.get(packet.address, [])
        name = names[-1] if names else None
        if letter == "a":
            self._totals_of(sandbox).allowed += 1
            key = FlowKey(packet.protocol, packet.source_port, packet.address, packet.port)
            if key not in known.flows:  # of one without an answer yet each packet is logged
                self._begin(known, key, name=name, rule=known.words.allowed(packet, version, names), at=now, logged=1)
        else:
            self._totals_of(sandbox).refused += 1
            self.floods.logged(sandbox)
            rule = known.words.refused(
                packet,
                version,
                names,
                is_limit=word == "limit",
                host_addresses=self.host_addresses,
                reach=self.reach,
            )
            refusal = Refusal(packet.protocol, name, str(packet.address), packet.port, rule)
            known.gathering.add(refusal, at=now, is_logged=True)

    def log_lost(self, sandbox: str, count: int, *, now: float) -> None:
        """So many packets were logged and not read."""
        self._write_missing(sandbox, count, verdict=None, at=now)

    def end_flow(self, flow: Flow, *, now: float) -> None:
        """The hub's kernel has forgotten a connection."""
        key = FlowKey(flow.protocol, flow.source_port, flow.address, flow.port)
        known = self._by_address.get(flow.source)
        if known is not None and (found := known.flows.end(key)) is not None:
            self._end(known.id, found, sent=flow.bytes_sent, received=flow.bytes_received, at=now)
            return
        for sandbox, late in self._late.items():
            if late.address in (flow.source, None) and (found := late.flows.end(key)) is not None:
                self._end(sandbox, found, sent=flow.bytes_sent, received=flow.bytes_received, at=now)
                return

    def ends_lost(self, *, now: float) -> None:
        """The hub's events came faster than they were read: some connections stay open in the records, up to the end of
        their sandbox."""
        for known in self._sandboxes.values():
            if len(known.flows):
                self._write_gap(known.id, 1, verdict="allowed", at=now, rule="the ends of some connections were lost")

    def take(self, report: Report, *, now: float) -> None:
        """A message of the forwarder or the peek."""
        known = self._sandboxes.get(report.sandbox)
        if known is None:
            late = self._late.get(report.sandbox)
            if late is not None and isinstance(report, PeekClosed):
                self._end_by_peek(late.flows, report, at=now)
            return
        if isinstance(report, Resolved):
            self._learn(known, report.name, report.address)
        elif isinstance(report, Refused):
            address = None if report.address is None else str(report.address)
            refusal = Refusal(report.kind, report.name, address, report.port, report.rule)
            known.gathering.add(refusal, at=now, is_logged=False)
        elif isinstance(report, PeekOpened):
            names = known.names.get(report.address, [])
            name, rule = report.name, report.rule
            if name is None and names:
                name, rule = names[-1], known.words.named(report.address, report.port, names, rule=rule)
            key = FlowKey("tcp", report.source_port, report.address, report.port)
            self._begin(known, key, name=name, rule=rule, at=now, logged=0, peek=report.id)
        elif isinstance(report, PeekClosed):
            self._end_by_peek(known.flows, report, at=now)
        else:
            self._write_gap(known.id, report.count, verdict=None, at=now)

    def count(self, sandbox: str, *, allowed: int, refused: int, now: float, is_beginning: bool = False) -> None:
        """The router's counters are the authority: what they have beyond the records is a gap. At their beginning they
        have begun anew, and nothing is missing yet."""
        totals = self._totals_of(sandbox)
        if is_beginning:
            totals.allowed, totals.refused, totals.missing = allowed, refused, 0
            return
        missing = totals.missing
        for verdict, counted, written in (("refused", refused, totals.refused), ("allowed", allowed, totals.allowed)):
            lacking = max(0, counted - written)
            known_missing = min(lacking, missing)
            missing -= known_missing
            if lacking > known_missing:
                self._write_missing(sandbox, lacking - known_missing, verdict=verdict, at=now)
                if sandbox in self._sandboxes:
                    self.floods.suspect(sandbox)

    def settle(self, now: float) -> None:
        """Write what is whole by now; to be called a few times a second."""
        for known in self._sandboxes.values():
            self._write_refusals(known, known.gathering.take(now))
        if self._earlier_refusals and now >= self._begun + LATE_S:
            self._earlier_refusals.clear()
        for sandbox in [name for name, late in self._late.items() if late.until <= now]:
            for flow in self._late.pop(sandbox).flows.all():
                self._end(sandbox, flow, sent=None, received=None, at=now)
        self.journal.flush()
        for sandbox, count in self.journal.take_lost().items():
            self._write_gap(sandbox, count, verdict=None, at=now)

    def finish(self, now: float) -> None:
        """Write everything: the process ends."""
        for known in self._sandboxes.values():
            self._write_refusals(known, known.gathering.take())
        self.settle(now)
        self.journal.close()

    # what is asked for

    def refusals(self, sandbox: str, after: int) -> tuple[list[dict[str, Any]], int, bool]:
        """Refusals behind number `after`, the number of the newest record, and whether none is missing."""
        known = self._sandboxes.get(sandbox)
        if known is not None:
            self._write_refusals(known, known.gathering.take())
        self.journal.flush()
        if known is None:
            return [], self.journal.last, False
        found = [entry for entry in known.refusals if entry["seq"] > after]
        return found, self.journal.last, known.dropped <= after

    # how it is written down

    def _begin(
        self,
        known: _Sandbox,
        key: FlowKey,
        *,
        name: str | None,
        rule: str,
        at: float,
        logged: int,
        peek: str | None = None,
    ) -> None:
        self._connection += 1
        flow = OpenFlow(connection=self._connection, key=key, name=name, rule=rule, peek=peek)
        replaced = known.flows.add(flow)
        if replaced is not None:
            self._end(known.id, replaced, sent=None, received=None, at=at)
        private = {"_port": key.source_port, "_peek": peek, "_logged": logged}
        self.journal.append({**_entry("open", known.id, flow, at=at), **private})

    def _end_by_peek(self, flows: OpenFlows, report: PeekClosed, *, at: float) -> None:
        found = flows.end_by_peek(report.id)
        if found is not None:
            self._end(report.sandbox, found, sent=report.bytes_sent, received=report.bytes_received, at=at)

    def _end(self, sandbox: str, flow: OpenFlow, *, sent: int | None, received: int | None, at: float) -> None:
        counted = {"bytes_sent": sent, "bytes_received": received}
        self.journal.append({**_entry("closed", sandbox, flow, at=at), **counted})

    def _write_refusals(self, known: _Sandbox, gathered: Collection[Gathered]) -> None:
        for held in gathered:
            self._connection += 1
            refusal = held.refusal
            entry = {
                "at": _moment(held.at),
                "sandbox": known.id,
                "event": "refused",
                "connection": self._connection,
                **refusal._asdict(),
                "count": held.count,
                "bytes_sent": None,
                "bytes_received": None,
            }
            if len(known.refusals) == _REFUSALS:
                known.dropped = known.refusals[0]["seq"]
            known.refusals.append({"seq": self.journal.next, **entry, "until": _moment(held.until)})
            self.journal.append({**entry, "_logged": held.logged})

    def _write_missing(self, sandbox: str, count: int, *, verdict: str | None, at: float) -> None:
        """What the router has counted."""
        self._totals_of(sandbox).missing += count
        self._write_gap(sandbox, count, verdict=verdict, at=at, missing=count)

    def _write_gap(
        self, sandbox: str, count: int, *, verdict: str | None, at: float, rule: str = LOST, missing: int = 0
    ) -> None:
        self._connection += 1
        fields = {"connection": self._connection, "kind": "gap", "verdict": verdict, "rule": rule, "count": count}
        self.journal.append({"at": _moment(at), "sandbox": sandbox, "event": "gap", **fields, "_missing": missing})

    def _learn(self, known: _Sandbox, name: str, address: IPv4Address) -> None:
        names = known.names.setdefault(address, [])
        known.names.move_to_end(address)
        if name in names:
            names.remove(name)
        names.append(name)
        del names[:-_NAMES_EACH]
        if len(known.names) > _MOST_ADDRESSES:
            known.names.popitem(last=False)

    def _totals_of(self, sandbox: str) -> Totals:
        totals = self._totals.setdefault(sandbox, Totals())
        if len(self._totals) > _ENDED + len(self._sandboxes):
            ended = next((name for name in self._totals if name not in self._sandboxes and name != sandbox), None)
            if ended is not None:
                del self._totals[ended]
        return totals

    def _state(self) -> dict[str, Any]:
        flows = [(known.id, known.flows.all()) for known in self._sandboxes.values()]
        flows += [(sandbox, late.flows.all()) for sandbox, late in self._late.items()]
        return kept_state(self._connection, self._totals, flows)


def _entry(event: str, sandbox: str, flow: OpenFlow, *, at: float) -> dict[str, Any]:
    return {
        "at": _moment(at),
        "sandbox": sandbox,
        "event": event,
        "connection": flow.connection,
        "kind": flow.key.protocol,
        "name": flow.name,
        "address": str(flow.key.address),
        "port": flow.key.port,
        "rule": flow.rule,
        "count": 1,
        "bytes_sent": None,
        "bytes_received": None,
    }


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
