"""What of a resolver's answer a guest may hear. The answer is made by whoever owns the zone: it is hostile, too."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.renderer
import dns.rrset

from cpuos.node.network.forwarder.query import HEADER, MAX_STREAM_BYTES, MAX_UDP_BYTES, Query, Rdtype
from cpuos.node.network.forwarder.replies import BLOCKED, Refusal, WireReply

__all__ = ["BadAnswer", "Sifted", "sift"]

MAX_TTL_S = 3600
"""A guest forgets an address no later than its opening in the rules ends."""
MAX_NEGATIVE_TTL_S = 300
_NO_SOA_TTL_S = 5
_MAX_ANSWERS, _MAX_OTHERS = 128, 96  # real answers are far smaller; reading more takes the process from others
_MAX_CHAIN = 16
MAX_ADDRESSES = 32
_NEGATIVE_PROOF = (dns.rdatatype.NSEC, dns.rdatatype.NSEC3)


class BadAnswer(Exception):
    """Not an answer to this question, or more than is read."""


@dataclass(frozen=True, kw_only=True)
class Sifted:
    """Either a reply or a refusal."""

    reply: WireReply | None = None
    refusal: Refusal | None = None
    addresses: tuple[ipaddress.IPv4Address, ...] = ()
    ttl_s: int = 0


def sift(
    query: Query,
    wire: bytes,
    *,
    blocked: Callable[[ipaddress.IPv4Address], str | None],
    denied: Callable[[str], Refusal | None],
) -> Sifted:
    """Keep the alias chain of the asked name and the records asked for, without addresses that are blocked.

    `blocked` names the block of an address; `denied` judges each alias. Raises BadAnswer.
    """
    message = _parse(wire)
    if message.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
        raise BadAnswer(f"rcode {message.rcode()}")
    chain, owner = _follow(message, query)
    for alias in chain:
        refusal = denied(alias[0].target.to_text(omit_final_dot=True).lower())
        if refusal is not None:
            return Sifted(refusal=refusal)
    found = message.get_rrset(message.answer, owner, dns.rdataclass.IN, dns.rdatatype.RdataType(query.rdtype))
    if found is not None and query.rdtype == Rdtype.A:
        found, block = _without_blocked(found, blocked)
        if found is None:
            return Sifted(refusal=Refusal(rule=f"always blocked: {block}", code=BLOCKED))
    kept = [*chain, found] if found is not None else chain
    authority = _negative_proof(message, query) if found is None else []
    ttl_s = _lifetime(kept, message if found is None else None)
    addresses = ()
    if found is not None and query.rdtype == Rdtype.A:
        addresses = tuple(ipaddress.IPv4Address(record.address) for record in found)
    signatures = [s for rrset in kept if query.dnssec_ok and (s := _signature(message, rrset))]
    return Sifted(
        reply=WireReply(_build(message, query, answer=[*kept, *signatures], authority=authority)),
        addresses=addresses,
        ttl_s=ttl_s,
    )


def _parse(wire: bytes) -> dns.message.Message:
    _, _, _, answers, authorities, additional = HEADER.unpack_from(wire)
    if answers > _MAX_ANSWERS or authorities + additional > _MAX_OTHERS:
        raise BadAnswer(f"{answers} answers and {authorities + additional} other records")
    try:
        message = dns.message.from_wire(wire, ignore_trailing=True)
    except Exception as problem:  # the parser's own errors, and whatever a hostile record provokes in it
        raise BadAnswer(f"{type(problem).__name__}: {problem}") from problem
    if len(message.question) != 1:
        raise BadAnswer("no question in it")
    return message


def _follow(message: dns.message.Message, query: Query) -> tuple[list[dns.rrset.RRset], dns.name.Name]:
    """The aliases from the asked name on, and the name at their end."""
    owner, chain = message.question[0].name, []
    if query.rdtype == Rdtype.CNAME:
        return chain, owner
    while len(chain) <= _MAX_CHAIN:
        alias = message.get_rrset(message.answer, owner, dns.rdataclass.IN, dns.rdatatype.CNAME)
        if alias is None:
            return chain, owner
        chain.append(dns.rrset.from_rdata(alias.name, alias.ttl, alias[0]))
        owner = alias[0].target
    raise BadAnswer("an alias chain without end")


def _without_blocked(
    found: dns.rrset.RRset, blocked: Callable[[ipaddress.IPv4Address], str | None]
) -> tuple[dns.rrset.RRset | None, str]:
    """The set without blocked addresses; None with the name of a block when nothing is left."""
    kept, block = [], ""
    for record in found:
        reason = blocked(ipaddress.IPv4Address(record.address))
        if reason is None:
            kept.append(record)
        else:
            block = reason
    return (dns.rrset.from_rdata_list(found.name, found.ttl, kept[:MAX_ADDRESSES]) if kept else None), block


def _negative_proof(message: dns.message.Message, query: Query) -> list[dns.rrset.RRset]:
    kept = []
    for rrset in message.authority:
        is_proof = rrset.rdtype in _NEGATIVE_PROOF or (
            rrset.rdtype == dns.rdatatype.RRSIG and rrset.covers in (*_NEGATIVE_PROOF, dns.rdatatype.SOA)
        )
        if rrset.rdtype == dns.rdatatype.SOA or (query.dnssec_ok and is_proof):
            kept.append(rrset)
    return kept


def _lifetime(kept: list[dns.rrset.RRset], negative: dns.message.Message | None) -> int:
    """How long the reply may be kept, the shortest of all; TTLs in it are cut to what is longest allowed."""
    lifetimes = [rrset.ttl for rrset in kept]
    if negative is not None:
        start = next((r for r in negative.authority if r.rdtype == dns.rdatatype.SOA), None)
        lifetimes.append(min(start.ttl, start[0].minimum, MAX_NEGATIVE_TTL_S) if start else _NO_SOA_TTL_S)
    return min([MAX_TTL_S, *lifetimes])


def _signature(message: dns.message.Message, rrset: dns.rrset.RRset) -> dns.rrset.RRset | None:
    return message.get_rrset(message.answer, rrset.name, rrset.rdclass, dns.rdatatype.RRSIG, rrset.rdtype)


def _build(
    message: dns.message.Message, query: Query, *, answer: list[dns.rrset.RRset], authority: list[dns.rrset.RRset]
) -> bytes:
    # No AD: what was left out here no validator has seen. No AA: this is no authority.
    flags = dns.flags.QR | dns.flags.RA | message.rcode()
    renderer = dns.renderer.Renderer(id=0, flags=flags, max_size=MAX_STREAM_BYTES)
    asked = message.question[0]
    try:
        renderer.add_question(asked.name, asked.rdtype, asked.rdclass)
        for section, rrsets in ((dns.renderer.ANSWER, answer), (dns.renderer.AUTHORITY, authority)):
            for rrset in rrsets:
                rrset.ttl = min(rrset.ttl, MAX_TTL_S)
                renderer.add_rrset(section, rrset)
        if query.has_edns:
            renderer.add_edns(0, dns.flags.DO if query.dnssec_ok else 0, MAX_UDP_BYTES)
        renderer.write_header()
    except Exception as problem:
        raise BadAnswer(f"cannot be written again: {problem}") from problem
    return bytes(renderer.get_wire())
