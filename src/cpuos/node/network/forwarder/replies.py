"""Answers made here, byte by byte: refusals with the rule in words, empty answers, addresses of operator exceptions."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cpuos.node.network.forwarder.query import CLASS_IN, HEADER, MAX_UDP_BYTES, Query, Rcode, Rdtype

__all__ = [
    "BLOCKED",
    "FILTERED",
    "NO_ANSWER",
    "PROHIBITED",
    "Refusal",
    "WireReply",
    "address_reply",
    "empty_reply",
    "error_reply",
    "opt_record",
    "refusal_reply",
]

_QR, _TC, _RD, _RA = 0x8000, 0x0200, 0x0100, 0x0080
_FIXED = struct.Struct(">HHIH")  # type, class, TTL, length
_OPT = struct.Struct(">BHHBBHH")
_DO = 0x8000
_EDE_OPTION = 15  # RFC 8914
_MAX_TEXT_BYTES = 200
_NEGATIVE_TTL_S = 60
# ". SOA . . 1 3600 600 86400 60": empty answers carry it, so that the guest may remember them.
_SOA = (
    b"\0"
    + _FIXED.pack(Rdtype.SOA, CLASS_IN, _NEGATIVE_TTL_S, 22)
    + b"\0\0"
    + struct.pack(">5I", 1, 3600, 600, 86400, _NEGATIVE_TTL_S)
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a question gets no answer: an extended error's number and its words."""

    rule: str
    code: int
    rcode: int = Rcode.REFUSED

    @property
    def text(self) -> str:
        return f"cpuos: {self.rule}" if self.rcode == Rcode.SERVFAIL else f"cpuos network policy: {self.rule}"


BLOCKED, FILTERED, PROHIBITED, NO_ANSWER = 15, 17, 18, 22
"""Extended errors: by the platform or workspace; by the sandbox's own lists; never for sandboxes; nobody to ask."""


class WireReply:
    """An answer kept as bytes, with the places of its TTLs: sent again it needs neither parser nor builder."""

    __slots__ = ("_ttls", "_wire")

    def __init__(self, wire: bytes) -> None:
        self._wire = wire
        self._ttls = _find_ttls(wire)

    def __len__(self) -> int:
        return len(self._wire)

    def for_query(self, query: Query, *, age_s: int = 0) -> bytes:
        """To `query`, which has the key that it was made for."""
        flags = _flags(self._wire)
        flags = flags | _RD if query.recursion_desired else flags & ~_RD
        question_end = HEADER.size + len(query.question)
        if len(self._wire) > query.max_bytes:
            additional = opt_record(query) if query.has_edns else b""
            return HEADER.pack(query.id, flags | _TC, 1, 0, 0, bool(additional)) + query.question + additional
        wire = bytearray(self._wire)
        struct.pack_into(">HH", wire, 0, query.id, flags)
        wire[HEADER.size : question_end] = query.question
        if age_s > 0:
            for place, ttl in self._ttls:
                struct.pack_into(">I", wire, place, max(0, ttl - age_s))
        return bytes(wire)


def error_reply(data: bytes, rcode: int) -> bytes:
    """To something that is no good question: its head alone, turned round."""
    number, flags = struct.unpack_from(">HH", data)
    opcode = flags & 0x7800
    additional = b""
    if rcode == Rcode.BADVERS:
        additional = _OPT.pack(0, Rdtype.OPT, MAX_UDP_BYTES, rcode >> 4, 0, 0, 0)
    head = _QR | opcode | (flags & _RD) | _RA | (rcode & 15)
    return HEADER.pack(number, head, 0, 0, 0, bool(additional)) + additional


def refusal_reply(query: Query, refusal: Refusal) -> bytes:
    """With the words as extended error, where the question has room for it (EDNS)."""
    additional = b""
    if query.has_edns:
        text = refusal.text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore").encode()
        option = struct.pack(">HHH", _EDE_OPTION, 2 + len(text), refusal.code) + text
        additional = opt_record(query, option)
    head = _QR | _RA | (_RD if query.recursion_desired else 0) | refusal.rcode
    return HEADER.pack(query.id, head, 1, 0, 0, bool(additional)) + query.question + additional


def empty_reply(query: Query, rcode: int = Rcode.NOERROR) -> bytes:
    """No such record (NOERROR) or no such name (NXDOMAIN)."""
    additional = opt_record(query) if query.has_edns else b""
    head = _QR | _RA | (_RD if query.recursion_desired else 0) | rcode
    return HEADER.pack(query.id, head, 1, 0, 1, bool(additional)) + query.question + _SOA + additional


def address_reply(query: Query, addresses: Sequence[ipaddress.IPv4Address], *, ttl_s: int) -> bytes:
    additional = opt_record(query) if query.has_edns else b""
    head = _QR | _RA | (_RD if query.recursion_desired else 0)
    records = b"".join(
        struct.pack(">H", 0xC000 | HEADER.size) + _FIXED.pack(Rdtype.A, CLASS_IN, ttl_s, 4) + address.packed
        for address in addresses
    )
    return HEADER.pack(query.id, head, 1, len(addresses), 0, bool(additional)) + query.question + records + additional


def opt_record(query: Query, options: bytes = b"") -> bytes:
    flags = _DO if query.dnssec_ok else 0
    return _OPT.pack(0, Rdtype.OPT, MAX_UDP_BYTES, 0, 0, flags, len(options)) + options


def _flags(wire: bytes) -> int:
    return int.from_bytes(wire[2:4], "big")


def _find_ttls(wire: bytes) -> tuple[tuple[int, int], ...]:
    """(place, TTL) of every record but OPT. `wire` was built here, so it is well-formed."""
    _, _, questions, *counts = HEADER.unpack_from(wire)
    at = HEADER.size
    for _ in range(questions):
        at = _skip_name(wire, at) + 4
    found = []
    for _ in range(sum(counts)):
        at = _skip_name(wire, at)
        rdtype, _, ttl, length = _FIXED.unpack_from(wire, at)
        if rdtype != Rdtype.OPT:
            found.append((at + 4, ttl))
        at += _FIXED.size + length
    return tuple(found)


def _skip_name(wire: bytes, at: int) -> int:
    while wire[at]:
        if wire[at] >= 0xC0:
            return at + 2
        at += 1 + wire[at]
    return at + 1
