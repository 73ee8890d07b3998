"""The forwarder of one sandbox: its policy, its cache, what it was told, and its share of the process."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from cpuos.node.network.forwarder.budget import Bucket
from cpuos.node.network.forwarder.cache import AnswerCache
from cpuos.node.network.forwarder.feed import Feed
from cpuos.node.network.forwarder.learned import LearnedAddresses
from cpuos.node.network.forwarder.query import CLASS_IN, Malformed, Query, Rcode, Rdtype, parse_query
from cpuos.node.network.forwarder.replies import (
    BLOCKED,
    FILTERED,
    NO_ANSWER,
    PROHIBITED,
    Refusal,
    WireReply,
    address_reply,
    empty_reply,
    error_reply,
    refusal_reply,
)
from cpuos.node.network.forwarder.sifting import BadAnswer, sift
from cpuos.node.network.forwarder.upstream import Upstream, UpstreamFailed
from cpuos.node.network.judge import Judge, Judgement
from cpuos.node.network.surroundings import EVERYWHERE, NO_UPLINK, is_reached
from cpuos.types.blocked import Exemption, blocked_reason
from cpuos.types.network import EffectivePolicy
from cpuos.types.special_names import RESOLVER_CANARY, special_name

__all__ = ["Limits", "SandboxForwarder", "World"]

Address = ipaddress.IPv4Address
_EXEMPTION_TTL_S = 60
_CUT_OFF = Refusal(rule=NO_UPLINK, code=NO_ANSWER)
_OWN = ("sandbox ", "not in the sandbox ")  # how the rules of the sandbox's own policy begin

# What programs ask for. The rest is refused by name: transfers, ANY, and types that carry anything (NULL, private use).
_TYPES = {
    Rdtype.A,
    Rdtype.NS,
    Rdtype.CNAME,
    Rdtype.SOA,
    Rdtype.PTR,
    Rdtype.MX,
    Rdtype.TXT,
    Rdtype.SRV,
    Rdtype.NAPTR,
    Rdtype.DS,
    Rdtype.SSHFP,
    Rdtype.DNSKEY,
    Rdtype.TLSA,
    Rdtype.URI,
    Rdtype.CAA,
}
# Sandboxes have no IPv6. HTTPS and SVCB would give addresses past the A record, and keys that hide the host name.
_EMPTY_TYPES = {Rdtype.AAAA, Rdtype.SVCB, Rdtype.HTTPS}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one sandbox."""

    queries_per_s: float = 250
    queries_burst: float = 250
    new_names_per_s: float = 50
    """Questions that leave the host: what a tunnel through names could use."""
    new_names_burst: float = 200
    time_share: float = 0.25
    """Of one processor, spent for it in this process."""
    time_burst_s: float = 0.25
    in_flight: int = 64
    waiting: int = 256
    name_length: int = 200
    labels: int = 20
    learned: int = 2048
    """Addresses of names; all of them fit into one message to the node."""
    cache_entries: int = 1000
    cache_bytes: int = 256 << 10
    streams: int = 16

    @classmethod
    def of_names(cls, names_per_s: int) -> Self:
        """Where the kernel lets so many questions a second through."""
        rate = 1.25 * names_per_s
        return cls(
            queries_per_s=rate, queries_burst=rate, new_names_per_s=names_per_s / 4, new_names_burst=float(names_per_s)
        )


@dataclass(kw_only=True)
class World:
    """What all sandboxes of the process share."""

    upstream: Upstream
    feed: Feed
    learn: Callable[[str, str, Sequence[tuple[Address, int]]], Awaitable[None]]
    """(sandbox, name, [(address, seconds)]): returns when the rules have them; raises when they do not."""
    clock: Callable[[], float] = time.monotonic
    limits: Limits = field(default_factory=Limits)
    host_addresses: frozenset[Address] = frozenset()
    reach: tuple[ipaddress.IPv4Network, ...] = EVERYWHERE
    """Where the host has a way to."""
    resolvers: tuple[Address, ...] | None = None
    """Whom `upstream` asks, where that is known: without a way to any of them no name is resolved."""
    most_in_flight: int = 1024
    in_flight: int = 0

    def is_cut_off(self, addresses: Iterable[Address] | None) -> bool:
        """Whether the host has a way to none of these."""
        return addresses is not None and not any(is_reached(address, self.reach) for address in addresses)


class SandboxForwarder:
    """`answer_now` answers what needs nobody else; what it leaves is for `answer_later`."""

    def __init__(
        self, sandbox: str, policy: EffectivePolicy, *, world: World, exemptions: Iterable[Exemption] = ()
    ) -> None:
        self.sandbox = sandbox
        self._world, limits = world, world.limits
        self._judge = Judge(policy)
        self._exempt: dict[str, list[Address]] = {}
        for exemption in exemptions:
            addresses = self._exempt.setdefault(exemption.name.lower().rstrip("."), [])
            if exemption.address not in addresses:
                addresses.append(exemption.address)
        self._cache = AnswerCache(clock=world.clock, max_entries=limits.cache_entries, max_bytes=limits.cache_bytes)
        self._learned = LearnedAddresses(clock=world.clock, most=limits.learned)
        self._pending: dict[tuple[str, int, bool, bool], asyncio.Task[WireReply]] = {}
        self._waiting = 0
        self.queries = Bucket(per_s=limits.queries_per_s, burst=limits.queries_burst, clock=world.clock)
        self.time = Bucket(per_s=limits.time_share, burst=limits.time_burst_s, clock=world.clock)
        self._new_names = Bucket(per_s=limits.new_names_per_s, burst=limits.new_names_burst, clock=world.clock)

    def set_policy(self, policy: EffectivePolicy) -> list[tuple[str, Address, int]]:
        """From now on; (name, address, seconds left) of all that was told before: what is open is judged by that."""
        self._judge = Judge(policy)
        self._cache.clear()
        return list(self._learned.all())

    def take_over(self, told: Iterable[tuple[str, Address, int]]) -> None:
        """What an earlier forwarder told the guest; the rules have it already."""
        for name, address, seconds in told:
            self._learned.restore(name, address, seconds_left=seconds)

    def forget_answers(self) -> None:
        """The blocks have changed."""
        self._cache.clear()

    async def close(self) -> None:
        pending = list(self._pending.values())
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def wait_s(self) -> float:
        """How long its next question is to wait for its share."""
        return max(self.queries.wait_s(), self.time.wait_s())

    def read(self, data: bytes, *, is_stream: bool) -> Query | bytes | None:
        """The question; or the answer to something that is none; or None for what gets no answer."""
        self.queries.spend(1)
        try:
            return parse_query(data, is_stream=is_stream)
        except Malformed as problem:
            return None if problem.rcode is None else error_reply(data, problem.rcode)

    def answer_now(self, query: Query) -> bytes | None:
        """The answer, unless somebody must be asked."""
        cached = self._cache.find(query) if query.rdclass == CLASS_IN else None
        if cached is not None:
            return cached
        if query.name in self._exempt and query.rdclass == CLASS_IN:
            return self._answer_exempt_now(query)
        special = special_name(query.name)
        if query.name == RESOLVER_CANARY and self._judge.names_matter:
            special = "where names decide, browsers leave their own resolvers off"
        if special is not None and query.rdclass == CLASS_IN:
            return self._refuse_special(query, special)
        refusal = self._refusal(query)
        if refusal is not None:
            return self._refuse(query, refusal)
        if self._world.is_cut_off(self._world.resolvers):
            return self._refuse(query, _CUT_OFF)
        return empty_reply(query) if query.rdtype in _EMPTY_TYPES else None

    async def answer_later(self, query: Query) -> bytes:
        """The answer of the resolvers, sifted, with its addresses open before it is sent."""
        if self._waiting >= self._world.limits.waiting:
            return self._fail(query, "too many questions at once")
        task = self._pending.get(query.key)
        if task is None:
            if len(self._pending) >= self._world.limits.in_flight:
                return self._fail(query, "too many questions at once")
            if self._world.in_flight >= self._world.most_in_flight:
                return self._fail(query, "the forwarder is busy")
            task = asyncio.get_running_loop().create_task(self._resolve(query))
            self._pending[query.key] = task
            self._world.in_flight += 1
            task.add_done_callback(lambda done: self._resolved(query))
        self._waiting += 1
        try:
            return (await asyncio.shield(task)).for_query(query)
        finally:
            self._waiting -= 1

    def _resolved(self, query: Query) -> None:
        self._pending.pop(query.key, None)
        self._world.in_flight -= 1

    async def _resolve(self, query: Query) -> WireReply:
        try:
            if query.name in self._exempt:
                return WireReply(await self._answer_exempt(query))
            return await self._ask(query)
        except asyncio.CancelledError:
            raise
        except UpstreamFailed as problem:
            return WireReply(self._fail(query, f"no resolver answered ({problem})", code=NO_ANSWER))
        except BadAnswer as problem:
            return WireReply(self._fail(query, str(problem), code=NO_ANSWER))
        except Exception as problem:  # whatever a hostile answer finds, one question fails and nothing is opened
            return WireReply(self._fail(query, f"{type(problem).__name__}"))

    async def _ask(self, query: Query) -> WireReply:
        if not self._new_names.take():
            return WireReply(self._fail(query, "too many new names in a short time", code=PROHIBITED))
        wire = await self._world.upstream.ask(query.name, query.rdtype, dnssec_ok=query.dnssec_ok)
        with self.measured():
            judge = self._judge  # it may have changed meanwhile
            judgement = judge.name(query.name)
            if not judgement.allowed:
                return WireReply(self._refuse(query, _refusal_of(judgement)))
            sifted = sift(query, wire, blocked=self._blocked, denied=_denied_by(judge))
            if sifted.refusal is not None:
                return WireReply(self._refuse(query, sifted.refusal))
        assert sifted.reply is not None
        await self._open(query.name, sifted.addresses, ttl_s=sifted.ttl_s)
        if self._judge is judge:
            self._cache.keep(query, sifted.reply, lifetime_s=sifted.ttl_s)
            return sifted.reply
        # The policy changed while the rules were being opened: they have been made anew by the new one.
        judgement = self._judge.name(query.name)
        return sifted.reply if judgement.allowed else WireReply(self._refuse(query, _refusal_of(judgement)))

    async def _open(self, name: str, addresses: Sequence[Address], *, ttl_s: int) -> None:
        """Have the rules open, and close, what the policy says of this name, before the guest can use it."""
        missing = self._learned.missing(name, addresses, ttl_s=ttl_s)
        if not missing:
            return
        if self._judge.follows(name):
            if not self._learned.has_room(len(missing)):
                raise BadAnswer("too many addresses of names")
            opening_s = self._learned.opening_s(ttl_s)
            await self._world.learn(self.sandbox, name, [(address, opening_s) for address in missing])
        self._learned.add(name, missing, ttl_s=ttl_s)
        for address in missing:
            self._world.feed.resolved(self.sandbox, name, str(address), ttl_s=self._learned.opening_s(ttl_s))

    def _answer_exempt_now(self, query: Query) -> bytes | None:
        """An operator exception is answered here, when the policy allows its name; its address once it is open."""
        judgement = self._judge.name(query.name)
        if not judgement.allowed:
            return self._refuse(query, _refusal_of(judgement))
        if self._world.is_cut_off(self._exempt[query.name]):
            return self._refuse(query, _CUT_OFF)
        return None if query.rdtype == Rdtype.A else empty_reply(query)

    async def _answer_exempt(self, query: Query) -> bytes:
        addresses = self._exempt[query.name]
        await self._open(query.name, addresses, ttl_s=_EXEMPTION_TTL_S)
        judgement = self._judge.name(query.name)
        if not judgement.allowed:
            return self._refuse(query, _refusal_of(judgement))
        return address_reply(query, addresses, ttl_s=_EXEMPTION_TTL_S)

    def _refusal(self, query: Query) -> Refusal | None:
        judgement = self._judge.name(query.name)
        if not judgement.allowed:
            return _refusal_of(judgement)
        if query.rdclass != CLASS_IN or query.rdtype not in _TYPES | _EMPTY_TYPES:
            return Refusal(rule=f"questions of type {query.rdtype}, class {query.rdclass} are refused", code=PROHIBITED)
        limits = self._world.limits
        if len(query.name) > limits.name_length or query.name.count(".") >= limits.labels:
            return Refusal(rule="always blocked: a name this long carries data", code=PROHIBITED)
        return None

    def _refuse_special(self, query: Query, reason: str) -> bytes:
        """No such name. What looks for a service of the host's network is recorded; a search for `localhost` is not."""
        if query.name.count(".") and not query.name.endswith(".arpa"):
            self._world.feed.refused(self.sandbox, query.name, rule=f"always blocked: {reason}")
        if query.has_edns:
            refusal = Refusal(rule=f"always blocked: {reason}", code=BLOCKED, rcode=Rcode.NXDOMAIN)
            return refusal_reply(query, refusal)
        return empty_reply(query, Rcode.NXDOMAIN)

    def _refuse(self, query: Query, refusal: Refusal) -> bytes:
        self._world.feed.refused(self.sandbox, query.name, rule=refusal.rule)
        return refusal_reply(query, refusal)

    def _fail(self, query: Query, why: str, *, code: int = 0) -> bytes:
        return refusal_reply(query, Refusal(rule=why, code=code, rcode=Rcode.SERVFAIL))

    def _blocked(self, address: Address) -> str | None:
        return blocked_reason(address, protocol="tcp", port=None, host_addresses=self._world.host_addresses)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Its share pays for the processor's time within; nothing is awaited there."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.time.spend(time.thread_time() - start)


def _refusal_of(judgement: Judgement) -> Refusal:
    """The sandbox's own lists were asked for by whoever made it; the rest was set by others."""
    return Refusal(rule=judgement.rule, code=FILTERED if judgement.rule.startswith(_OWN) else BLOCKED)


def _denied_by(judge: Judge) -> Callable[[str], Refusal | None]:
    def denied(name: str) -> Refusal | None:
        judgement = judge.alias(name)
        return _refusal_of(judgement) if judgement is not None else None

    return denied
