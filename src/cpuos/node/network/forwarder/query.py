"""A guest's question, read from its bytes by hand: for most the answer is in the cache, and the reading is the cost."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

__all__ = ["CLASS_IN", "MAX_STREAM_BYTES", "MAX_UDP_BYTES", "Malformed", "Query", "Rcode", "Rdtype", "parse_query"]

HEADER = struct.Struct(">6H")
CLASS_IN = 1
MAX_UDP_BYTES = 1232
"""What fits through every path without fragments (DNS flag day 2020)."""
MIN_UDP_BYTES = 512
MAX_STREAM_BYTES = 65535

_QR, _RD = 0x8000, 0x0100
_DO = 0x8000
_TAIL = struct.Struct(">HH")
_OPT = struct.Struct(">BHHBBHH")  # root, type, size, extended rcode, version, flags, length
_MAX_NAME_BYTES = 255
_LABEL = re.compile(rb"[a-z0-9_-]+")


class Rcode:
    NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
    BADVERS = 16


class Rdtype:
    A, NS, CNAME, SOA, NULL, PTR, MX, TXT = 1, 2, 5, 6, 10, 12, 15, 16
    AAAA, SRV, NAPTR, OPT, DS, SSHFP, DNSKEY = 28, 33, 35, 41, 43, 44, 48
    TLSA, SVCB, HTTPS, IXFR, AXFR, ANY, URI, CAA = 52, 64, 65, 251, 252, 255, 256, 257


class Malformed(Exception):
    """Bytes that are no question; with `rcode` None they are not even answered."""

    def __init__(self, rcode: int | None) -> None:
        super().__init__(f"rcode {rcode}")
        self.rcode = rcode


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    id: int
    name: str
    """Lower case, no dot at the end; "" is the root."""
    rdtype: int
    rdclass: int
    question: bytes
    """As it came, in the case in which it came: it is sent back so."""
    recursion_desired: bool
    has_edns: bool
    dnssec_ok: bool
    max_bytes: int
    """The longest answer that may be sent."""

    @property
    def key(self) -> tuple[str, int, bool, bool]:
        """Equal for questions with equal answers. Too long ones are cut when they are sent."""
        return (self.name, self.rdtype, self.has_edns, self.dnssec_ok)


def parse_query(data: bytes, *, is_stream: bool) -> Query:
    """Raises Malformed."""
    if len(data) < HEADER.size:
        raise Malformed(None)
    number, flags, questions, answers, authorities, additional = HEADER.unpack_from(data)
    if flags & _QR:
        raise Malformed(None)
    if flags >> 11 & 15:
        raise Malformed(Rcode.NOTIMP)
    if questions != 1 or answers or authorities or additional > 1:
        raise Malformed(Rcode.FORMERR)
    name, end = _parse_name(data)
    if len(data) < end + 4:
        raise Malformed(Rcode.FORMERR)
    rdtype, rdclass = _TAIL.unpack_from(data, end)
    end += 4
    size, dnssec_ok = MIN_UDP_BYTES, False
    if additional:
        size, dnssec_ok = _parse_edns(data, end)
    elif len(data) != end:
        raise Malformed(Rcode.FORMERR)
    return Query(
        id=number,
        name=name,
        rdtype=rdtype,
        rdclass=rdclass,
        question=data[HEADER.size : end],
        recursion_desired=bool(flags & _RD),
        has_edns=bool(additional),
        dnssec_ok=dnssec_ok,
        max_bytes=MAX_STREAM_BYTES if is_stream else min(max(size, MIN_UDP_BYTES), MAX_UDP_BYTES),
    )


def _parse_name(data: bytes) -> tuple[str, int]:
    """The name and where it ends. Only letters, digits, hyphen and underscore: a dot or a blank inside a label would
    be another name to whoever reads it as text."""
    labels = []
    at = HEADER.size
    while True:
        if at >= len(data):
            raise Malformed(Rcode.FORMERR)
        length = data[at]
        at += 1
        if not length:
            break
        if length > 63 or at + length > len(data) or at + length - HEADER.size >= _MAX_NAME_BYTES:
            raise Malformed(Rcode.FORMERR)
        label = data[at : at + length].lower()
        if not _LABEL.fullmatch(label):
            raise Malformed(Rcode.REFUSED)
        labels.append(label)
        at += length
    return b".".join(labels).decode("ascii"), at


def _parse_edns(data: bytes, start: int) -> tuple[int, bool]:
    """Size and DO bit of the one additional record, which must be OPT and end where the message ends."""
    if len(data) < start + _OPT.size:
        raise Malformed(Rcode.FORMERR)
    root, rdtype, size, _, version, flags, length = _OPT.unpack_from(data, start)
    if root or rdtype != Rdtype.OPT or start + _OPT.size + length != len(data):
        raise Malformed(Rcode.FORMERR)
    if version:
        raise Malformed(Rcode.BADVERS)
    return size, bool(flags & _DO)
