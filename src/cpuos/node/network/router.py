"""The router of one sandbox: its rules loaded, its policy changed, its connections seen and cut. Calls block."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

from cpuos.errors import PlatformError
from cpuos.node import syscalls
from cpuos.node.network.conntrack import ConntrackSocket, Flow
from cpuos.node.network.judge import Judge, Passage
from cpuos.node.network.namespaces import in_fresh_thread
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.policy_rules import NamedAddress, learn_rules, name_set_names, policy_rules
from cpuos.node.network.rules import GUEST_FLOW, PEEK_FLOW, PEEK_SOCKET_MARK, TABLE, base_stamp, host_rules
from cpuos.node.network.surroundings import Surroundings
from cpuos.runtimes.base import ROUTER_ADDRESS
from cpuos.runtimes.descriptors import move_up
from cpuos.types.blocked import Exemption, blocked_reason

__all__ = ["Counters", "NamesOf", "Router"]

T = TypeVar("T")
NamesOf = Callable[[IPv4Address], Collection[str]]
_NAME_SET = re.compile(r"(?:named|denied)_\d+_\d+_(\d+)")
_SO_MARK = 36  # asm-generic/socket.h; Python 3.11 has no name for it


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Packets since the router was made. First packets of connections, where nothing else is said."""

    allowed: int
    """Each is logged ("a VERSION"); these and `peeked` are all that the guest opened."""
    peeked: int
    refused: int
    """Each packet; logged ("d VERSION") as far as the log's own limit lets it."""
    limited: int
    """Allowed, but over a cap; logged ("d VERSION limit") like refused ones."""
    stray: int
    """Packets of no connection: of one that was cut, or never was."""
    forged: int
    """Frames that no honest guest sends: another's address, another protocol family, IP options."""
    paced: int
    """Packets dropped since they were too many, either way."""
    names_paced: int
    """The same of DNS questions."""
    dialled: int
    """Opened by the peek."""
    undialled: int
    """Tried from inside the router and refused."""


class Router:
    """Kept by the node for each slot in use. It holds the namespace alive until it is closed."""

    def __init__(self, *, exemptions: Collection[Exemption] = (), named_addresses: int = 8192) -> None:
        self._exemptions = tuple(exemptions)
        self._named_addresses = named_addresses
        self._surroundings = Surroundings()
        self._judge: Judge | None = None
        self._generation = 0
        self._name_sets: list[str] = []
        self._namespace = -1
        self._lock = threading.Lock()  # guards all of these, and keeps changes in order

    @classmethod
    def open(cls, namespace: Path, *, exemptions: Collection[Exemption] = (), named_addresses: int = 8192) -> Router:
        """`namespace` is a router with its base rules, of this daemon or an earlier one: what holds there goes on."""
        router = cls(exemptions=exemptions, named_addresses=named_addresses)
        router._namespace = move_up(os.open(namespace, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        try:
            router._inside(router._open)
        except BaseException:
            os.close(router._namespace)
            raise
        return router

    def apply(self, judge: Judge, *, learned: Collection[NamedAddress] = (), base: str = "") -> None:
        """Put this policy in the place of the one before, in one step. What is open already is `cut` apart from it.

        `base`: base rules that have to lie under it. Where an earlier daemon left others, they come in the same step;
        the counters begin anew then.
        """

        def work() -> None:
            generation = self._generation + 1
            others = "" if not base or self._has_base(base) else base
            policy = policy_rules(
                judge,
                generation=generation,
                learned=learned,
                replaced=() if others else self._name_sets,
                named_addresses=self._named_addresses,
            )
            self._nft.run(others + policy)
            self._judge, self._generation = judge, generation
            self._name_sets = name_set_names(judge, generation)

        self._inside(work)

    def learn(self, learned: Collection[NamedAddress]) -> None:
        """The forwarder is about to tell the guest these addresses."""

        def work() -> None:
            if self._judge is None:
                raise PlatformError("cannot open an address for its name", "the router has no policy yet")
            script = learn_rules(self._judge, learned, generation=self._generation)
            if script:
                self._nft.run(script)

        self._inside(work)

    def set_surroundings(self, surroundings: Surroundings) -> None:
        def work() -> None:
            self._nft.run(host_rules(surroundings))
            self._surroundings = surroundings

        self._inside(work)

    def cut(self, judge: Judge, names_of: NamesOf) -> list[Flow]:
        """Take out what the guest has open and may not have under this policy; the next packet of each is answered
        with a reset. Gives what was cut. `names_of`: under which names the guest was told an address."""
        with self._lock:
            flows = [flow for flow in self._conntrack.flows() if not self._may_stay(flow, judge, names_of)]
            return [flow for flow in flows if self._conntrack.delete(flow)]

    def flows(self) -> list[Flow]:
        """All connections: the guest's own have mark `GUEST_FLOW`."""
        with self._lock:
            return self._conntrack.flows()

    def counters(self) -> Counters:
        def work() -> Counters:
            found: dict[str, int] = {}
            for family in ("ip", "netdev"):
                for entry in self._nft.query(f"list counters table {family} {TABLE}"):
                    counter = entry.get("counter")
                    if counter:
                        found[counter["name"]] = found.get(counter["name"], 0) + counter["packets"]
            return Counters(**found)

        return self._inside(work)

    def peek_sockets(self, count: int) -> list[socket.socket]:
        """Unconnected, non-blocking TCP sockets for the peek: only these may dial what the policy allows."""

        def work() -> list[socket.socket]:
            made: list[socket.socket] = []
            try:
                for _ in range(count):
                    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
                    made.append(socket.socket(socket.AF_INET, kind))
                    made[-1].setsockopt(socket.SOL_SOCKET, _SO_MARK, PEEK_SOCKET_MARK)
                    made[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except BaseException:
                for one in made:
                    one.close()
                raise
            return made

        return self._inside(work)

    def close(self) -> None:
        """Let go of the namespace; again is fine."""
        with self._lock:
            if self._namespace >= 0:
                self._nft.close()
                self._conntrack.close()
                os.close(self._namespace)
                self._namespace = -1

    def _open(self) -> None:
        self._nft = NftContext()
        try:
            self._conntrack = ConntrackSocket()
            self._name_sets = self._list_name_sets()
        except BaseException:
            self._nft.close()
            raise
        self._generation = max((_generation(name) for name in self._name_sets), default=0)

    def _has_base(self, base: str) -> bool:
        chains = (entry.get("chain", {}) for entry in self._nft.query("list chains ip"))
        return base_stamp(base) in [chain.get("name") for chain in chains if chain.get("table") == TABLE]

    def _list_name_sets(self) -> list[str]:
        sets = [_named(entry) for entry in self._nft.query(f"list sets table ip {TABLE}")]
        return [name for name in sets if _NAME_SET.fullmatch(name)]

    def _may_stay(self, flow: Flow, judge: Judge, names_of: NamesOf) -> bool:
        if flow.mark not in (GUEST_FLOW, PEEK_FLOW):
            return True
        address, protocol, port = flow.address, flow.protocol, flow.port
        blocked = blocked_reason(
            address,
            protocol=protocol,
            port=port,
            exemptions=self._exemptions,
            host_addresses=self._surroundings.addresses,
        )
        if blocked:
            return False
        names = names_of(address)
        passage = judge.passage(address, protocol=protocol, port=port, names=names)
        if passage is not Passage.PEEKED:
            return passage is Passage.DIRECT
        # The peek judges the connections that it has by the names that it read. One that passed it by may be going
        # to a name that is denied now: it stays only where names are known, and all of them are allowed.
        by_peek = flow.mark == PEEK_FLOW or str(flow.answered_by) == ROUTER_ADDRESS
        return by_peek or (
            bool(names) and judge.destination(address, protocol=protocol, port=port, names=names).allowed
        )

    def _inside(self, work: Callable[[], T]) -> T:
        """libnftables may open its socket anew in the middle of a script, so the thread has to be in the namespace."""

        def run() -> T:
            syscalls.setns(self._namespace, syscalls.CLONE_NEWNET)
            return work()

        with self._lock:
            if self._namespace < 0:
                raise PlatformError("cannot use the router of a sandbox", "it is closed")
            return in_fresh_thread(run)


def _named(entry: dict[str, Any]) -> str:
    return str(entry.get("set", {}).get("name", ""))


def _generation(name_set: str) -> int:
    match = _NAME_SET.fullmatch(name_set)
    return int(match[1]) if match else 0
