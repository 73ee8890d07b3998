"""Arbitrary bytes from guests and from resolvers: never a crash, never an address that is blocked."""

from __future__ import annotations

import ipaddress
import struct

import dns.exception
import dns.message
import dns.rdatatype
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from resolver_rig import Clock, policy, rrset

from cpuos.node.network.forwarder.feed import Feed
from cpuos.node.network.forwarder.query import Malformed, Query, parse_query
from cpuos.node.network.forwarder.replies import Refusal, WireReply, empty_reply, error_reply, refusal_reply
from cpuos.node.network.forwarder.sandbox import SandboxForwarder, World
from cpuos.node.network.forwarder.sifting import BadAnswer, sift
from cpuos.node.network.forwarder.upstream import Upstream
from cpuos.types.blocked import blocked_reason
from cpuos.types.special_names import special_name

NAMES = ["www.example", "a.www.example", "b.example", "c.example", "example"]


def make_forwarder(network="internet") -> SandboxForwarder:
    clock = Clock()
    world = World(upstream=Upstream([], clock=clock), feed=Feed(None, clock=clock), learn=None, clock=clock)
    return SandboxForwarder("a" * 20, policy(network), world=world)


def question(name: str = "www.example", rdtype: str = "A", **rest) -> bytes:
    return dns.message.make_query(name, rdtype, **rest).to_wire()


QUESTIONS = [
    question(),
    question(use_edns=0, payload=4096),
    question("x" * 63 + "." + "y" * 63, "TXT", want_dnssec=True),
    question(".", "NS"),
    question("1.0.0.127.in-addr.arpa", "PTR", use_edns=0),
]


def mutated(seeds: list[bytes]):
    """One of `seeds` with a few bytes changed, cut or added."""

    def change(draw_from):
        seed, changes, cut, tail = draw_from
        data = bytearray(seed)
        for place, value in changes:
            data[place % len(data)] = value
        return bytes(data[: len(data) - cut if cut < len(data) else 0]) + tail

    places = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=6)
    return st.tuples(st.sampled_from(seeds), places, st.integers(0, 30), st.binary(max_size=8)).map(change)


@settings(max_examples=400, deadline=None)
@given(data=st.one_of(st.binary(max_size=300), mutated(QUESTIONS)), is_stream=st.booleans())
@example(data=b"", is_stream=False)
@example(data=b"\0" * 12, is_stream=True)
@example(data=b"\0\1\1\0\0\1\0\0\0\0\0\0\xc0\x0c\0\1\0\1", is_stream=False)
def test_whatever_a_guest_sends(data: bytes, is_stream: bool) -> None:
    for network in ("internet", "off", {"allow": ["*.example"]}):
        forwarder = make_forwarder(network)
        query = forwarder.read(data, is_stream=is_stream)
        answer = forwarder.answer_now(query) if isinstance(query, Query) else query
        if answer is None:
            # Nothing, or a question for a resolver: then with a name that is one.
            assert query is None or all(label.isascii() for label in query.name.split("."))
            continue
        assert answer[:2] == data[:2]
        assert len(answer) <= (65535 if is_stream else 1232)
        parsed = dns.message.from_wire(answer)
        assert parsed.answer == []
        assert parsed.id == struct.unpack(">H", data[:2])[0]


@settings(max_examples=200, deadline=None)
@given(data=st.one_of(st.binary(max_size=300), mutated(QUESTIONS)))
def test_our_reading_agrees_with_another_reader(data: bytes) -> None:
    """A question that is read two ways could pass the policy as one name and be asked as another."""
    try:
        ours = parse_query(data, is_stream=False)
    except Malformed:
        return
    theirs = dns.message.from_wire(data, ignore_trailing=False)
    asked = theirs.question[0]
    assert asked.name.to_text(omit_final_dot=True).lower() == (ours.name or ".")
    assert (asked.rdtype, asked.rdclass, theirs.id) == (ours.rdtype, ours.rdclass, ours.id)
    assert (theirs.edns >= 0) == ours.has_edns


RECORDS = st.builds(
    lambda owner, ttl, data: f"{owner}. {ttl} IN {data}",
    st.sampled_from(NAMES),
    st.sampled_from([0, 1, 60, 86400, 2**31 - 1]),
    st.one_of(
        st.integers(0, 2**32 - 1).map(lambda number: f"A {ipaddress.IPv4Address(number)}"),
        st.sampled_from(
            ["A 10.0.0.1", "A 127.0.0.1", "A 169.254.169.254", "A 93.184.215.14", "AAAA ::ffff:10.0.0.1", 'TXT "x"']
        ),
        st.sampled_from(NAMES).map(lambda name: f"CNAME {name}."),
        st.sampled_from(NAMES).map(lambda name: f"DNAME {name}."),
        st.just("SOA a. b. 1 2 3 4 5"),
        st.just("NS 10.0.0.1."),
    ),
)


def blocked(address: ipaddress.IPv4Address) -> str | None:
    return blocked_reason(address, protocol="tcp", port=None)


def denied(name: str) -> Refusal | None:
    return Refusal(rule="no", code=15) if name == "c.example" else None


def response(answers: list[str], authority: list[str], additional: list[str], *, rcode: int) -> bytes:
    message = dns.message.make_response(dns.message.make_query("www.example", "A"))
    message.set_rcode(rcode)
    for section, lines in ((message.answer, answers), (message.authority, authority), (message.additional, additional)):
        section.extend(rrset(line) for line in lines)
    return message.to_wire(max_size=65535)


SOME = st.lists(RECORDS, max_size=6)


@settings(max_examples=400, deadline=None)
@given(answers=SOME, authority=SOME, additional=SOME, rcode=st.sampled_from([0, 0, 0, 3, 2]), edns=st.booleans())
def test_whatever_a_zone_says(answers, authority, additional, rcode, edns) -> None:
    query = parse_query(question(use_edns=0 if edns else None), is_stream=False)
    try:
        sifted = sift(query, response(answers, authority, additional, rcode=rcode), blocked=blocked, denied=denied)
    except BadAnswer:
        return
    if sifted.reply is None:
        assert sifted.refusal is not None
        assert sifted.addresses == ()
        return
    told = dns.message.from_wire(sifted.reply.for_query(query, age_s=1))
    owner, open_addresses = told.question[0].name, []
    for found in told.answer:
        assert found.name == owner  # one chain from the asked name on
        assert found.ttl <= 3600
        if found.rdtype == dns.rdatatype.CNAME:
            owner = found[0].target
            assert owner.to_text() != "c.example."
        else:
            assert found.rdtype == dns.rdatatype.A
            open_addresses += [ipaddress.IPv4Address(record.address) for record in found]
    assert not [address for address in open_addresses if blocked(address)]
    assert sorted(open_addresses) == sorted(sifted.addresses)  # what is told is what is opened
    assert 0 <= sifted.ttl_s <= 3600
    assert told.additional == []
    assert {found.rdtype for found in told.authority} <= {dns.rdatatype.SOA}


ANSWERS = [
    response(["www.example. 60 IN CNAME b.example.", "b.example. 60 IN A 93.184.215.14"], [], [], rcode=0),
    response([], ["example. 60 IN SOA a. b. 1 2 3 4 5"], [], rcode=3),
    response(["www.example. 60 IN A 10.0.0.1", 'www.example. 60 IN TXT "abc"'], [], [], rcode=0),
]


@settings(max_examples=600, deadline=None)
@given(data=st.one_of(st.binary(min_size=12, max_size=400), mutated(ANSWERS)), edns=st.booleans())
def test_whatever_a_resolver_sends(data: bytes, edns: bool) -> None:
    """The upstream gives only what begins with the question; the rest may be anything."""
    asked = question(use_edns=0 if edns else None)
    query = parse_query(asked, is_stream=False)
    # as `Upstream` has checked it: question count and question
    data = data[:4] + b"\0\1" + data[6:12].ljust(6, b"\0") + query.question + data[12 + len(query.question) :]
    try:
        sifted = sift(query, data, blocked=blocked, denied=denied)
    except BadAnswer:
        return
    if sifted.reply is not None:
        told = dns.message.from_wire(sifted.reply.for_query(query, age_s=5))
        assert not [a for a in sifted.addresses if blocked(a)]
        shown = [r.address for found in told.answer if found.rdtype == dns.rdatatype.A for r in found]
        assert sorted(shown) == sorted(map(str, sifted.addresses))


def test_a_bomb_of_records_is_not_read() -> None:
    lines = [f"www.example. 60 IN A 93.184.{n // 250}.{n % 250}" for n in range(200)]
    query = parse_query(question(), is_stream=True)
    with pytest.raises(BadAnswer, match="200 answers"):
        sift(query, response(lines, [], [], rcode=0), blocked=blocked, denied=denied)


@settings(max_examples=200, deadline=None)
@given(name=st.text(alphabet="0123456789abc-_.xip6arpndl", max_size=60))
def test_special_names_of_any_form(name: str) -> None:
    assert special_name(name.strip(".")) is None or isinstance(special_name(name.strip(".")), str)
    assert special_name(f"{name.strip('.') or 'x'}.local") is not None


def test_replies_age_and_are_cut() -> None:
    data = question(use_edns=0, payload=512)
    query = parse_query(data, is_stream=False)
    reply = WireReply(response([f"www.example. 60 IN A 93.184.0.{n}" for n in range(50)], [], [], rcode=0))
    assert dns.message.from_wire(reply.for_query(query)).answer == []
    stream = parse_query(data, is_stream=True)
    assert {found.ttl for found in dns.message.from_wire(reply.for_query(stream, age_s=61)).answer} == {0}
    assert {found.ttl for found in dns.message.from_wire(reply.for_query(stream, age_s=20)).answer} == {40}


@pytest.mark.parametrize("rcode", [1, 4, 5, 16])
def test_errors_are_messages(rcode: int) -> None:
    for data in QUESTIONS:
        answer = dns.message.from_wire(error_reply(data, rcode))
        assert answer.rcode() == rcode
        assert answer.question == []


def test_refusals_fit_and_name_the_rule() -> None:
    query = parse_query(question(use_edns=0), is_stream=False)
    answer = dns.message.from_wire(refusal_reply(query, Refusal(rule="workspace deny " + "ä" * 300, code=15)))
    text = answer.options[0].text
    assert text.startswith("cpuos network policy: workspace deny ää")
    assert len(text.encode()) <= 200
    with pytest.raises(dns.exception.DNSException):
        dns.message.from_wire(empty_reply(query)[:-3])
