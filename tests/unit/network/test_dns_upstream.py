"""Questions to resolvers: what is taken for an answer, and who is asked when."""

from __future__ import annotations

import asyncio

import dns.flags
import dns.message
import dns.rcode
import pytest
from resolver_rig import Clock, FakeResolver, rrset

from cpuos.node.network.forwarder.upstream import Resolver, Upstream, UpstreamFailed

WEB = "www.example. 300 IN A 93.184.215.14"


@pytest.fixture
async def resolver():
    async with FakeResolver() as made:
        made.zone = {("www.example", "A"): [WEB]}
        yield made


def make(*resolvers, clock=None, tries_s=(20, 20, 20)) -> Upstream:
    return Upstream([r.resolver for r in resolvers], clock=clock or Clock(), tries_s=tries_s)


def good(query: dns.message.Message) -> dns.message.Message:
    answer = dns.message.make_response(query, recursion_available=True)
    answer.answer.append(rrset(WEB))
    return answer


def forged(query: dns.message.Message) -> dns.message.Message:
    answer = dns.message.make_response(query)
    answer.answer.append(rrset("www.example. 300 IN A 6.6.6.6"))
    return answer


async def first_address(upstream: Upstream, name: str = "www.example") -> str:
    return dns.message.from_wire(await upstream.ask(name, 1, dnssec_ok=False)).answer[0][0].address


async def test_number_port_and_case_are_drawn_anew(resolver) -> None:
    upstream = make(resolver)
    for _ in range(24):
        await upstream.ask("www.example", 1, dnssec_ok=False)
    queries = [dns.message.from_wire(data) for data in resolver.raw]
    assert len({query.id for query in queries}) > 20
    assert len(set(resolver.ports)) > 18
    assert len({query.question[0].name.labels for query in queries}) > 18
    for query in queries:
        assert query.flags & dns.flags.RD
        assert query.payload == 1232
        assert not query.ednsflags
        assert [option.otype for option in query.options] == []  # nothing about who asks


async def test_dnssec_is_asked_for_when_the_guest_does(resolver) -> None:
    await make(resolver).ask("www.example", 1, dnssec_ok=True)
    assert dns.message.from_wire(resolver.raw[0]).ednsflags & dns.flags.DO


async def test_an_answer_with_another_number_is_none(resolver) -> None:
    def script(query, via):
        wrong = forged(query)
        wrong.id = (query.id + 1) % 65536
        return [wrong.to_wire()] * 5 + [good(query).to_wire()]

    resolver.script = script
    assert await first_address(make(resolver)) == "93.184.215.14"


async def test_an_answer_in_another_case_is_asked_again_over_tcp(resolver) -> None:
    def script(query, via):
        answer = good(query) if via == "tcp" else forged(query)
        wire = answer.to_wire()
        return wire if via == "tcp" else wire[:12] + wire[12:].swapcase()

    resolver.script = script
    assert await first_address(make(resolver)) == "93.184.215.14"
    assert [asked[2] for asked in resolver.asked] == ["udp", "tcp"]


async def test_a_shower_of_guesses_is_asked_again_over_tcp(resolver) -> None:
    def script(query, via):
        if via == "tcp":
            return good(query).to_wire()
        wrong = []
        for number in range(60):
            answer = forged(query)
            answer.id = (query.id + 1 + number) % 65536
            wrong.append(answer.to_wire())
        return wrong

    resolver.script = script
    assert await first_address(make(resolver)) == "93.184.215.14"
    assert [asked[2] for asked in resolver.asked] == ["udp", "tcp"]


@pytest.mark.parametrize("how", ["not_an_answer", "two_questions", "other_name", "notify", "empty", "short"])
async def test_what_does_not_answer_the_question_is_none(resolver, how) -> None:
    def script(query, via):
        answer = forged(query)
        if how == "not_an_answer":
            answer.flags &= ~dns.flags.QR
        elif how == "notify":
            answer.flags |= 4 << 11
        elif how == "other_name":
            answer.question = [rrset("wwx.example. 0 IN A 1.2.3.4")]
        wire = bytearray(answer.to_wire())
        if how == "two_questions":
            wire[5] = 2
        return {"empty": b"", "short": bytes(wire[:11])}.get(how, bytes(wire))

    resolver.script = script
    with pytest.raises(UpstreamFailed):
        await make(resolver, tries_s=[0.3]).ask("www.example", 1, dnssec_ok=False)


async def test_another_host_cannot_answer(resolver) -> None:
    """The socket is connected: what comes from another port is not even delivered."""
    loop = asyncio.get_running_loop()
    other, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))

    def script(query, via):
        other.sendto(forged(query).to_wire(), ("127.0.0.1", resolver.ports[-1]))
        return good(query).to_wire()

    resolver.script = script
    assert await first_address(make(resolver)) == "93.184.215.14"
    other.close()


async def test_a_cut_answer_is_fetched_over_tcp(resolver) -> None:
    resolver.zone[("big.example", "TXT")] = [f'big.example. 60 IN TXT "{"x" * 200}{n}"' for n in range(40)]
    answer = dns.message.from_wire(await make(resolver).ask("big.example", 16, dnssec_ok=False))
    assert len(answer.answer[0]) == 40
    assert [asked[2] for asked in resolver.asked] == ["udp", "tcp"]


async def test_an_answer_without_end_is_not_read(resolver) -> None:
    resolver.zone[("big.example", "TXT")] = [f'big.example. 60 IN TXT "{"x" * 200}{n}"' for n in range(100)]
    with pytest.raises(UpstreamFailed, match="too long"):
        await make(resolver).ask("big.example", 16, dnssec_ok=False)


@pytest.mark.parametrize("how", ["silent", "refuses", "fails", "garbage", "closes"])
async def test_the_next_resolver_is_asked(resolver, how) -> None:
    def script(query, via):
        if how in ("refuses", "fails"):
            answer = dns.message.make_response(query)
            answer.set_rcode(dns.rcode.REFUSED if how == "refuses" else dns.rcode.SERVFAIL)
            return answer.to_wire()
        return b"\xff" * 60 if how == "garbage" else None

    async with FakeResolver() as bad:
        bad.script = script
        upstream = make(bad, resolver, tries_s=(0.3, 20))
        if how == "closes":
            await bad.__aexit__()
        assert await first_address(upstream) == "93.184.215.14"


async def test_nobody_answers() -> None:
    with pytest.raises(UpstreamFailed, match="no resolver is configured"):
        await make().ask("www.example", 1, dnssec_ok=False)
    async with FakeResolver() as silent:
        silent.script = lambda query, via: None
        loop = asyncio.get_running_loop()
        begin = loop.time()
        with pytest.raises(UpstreamFailed, match=silent.address):
            await make(silent, silent, silent, tries_s=(0.05, 0.05, 0.05)).ask("www.example", 1, dnssec_ok=False)
        assert loop.time() - begin < 20
    refused = Upstream([Resolver("127.0.0.1", 9)], clock=Clock(), tries_s=[20])
    with pytest.raises(UpstreamFailed, match="refused"):
        await refused.ask("www.example", 1, dnssec_ok=False)


async def test_a_resolver_that_failed_is_asked_last_for_a_while(resolver) -> None:
    clock = Clock()
    async with FakeResolver() as silent:
        silent.script = lambda query, via: None
        upstream = make(silent, resolver, clock=clock, tries_s=(0.05, 20))
        for _ in range(5):
            assert await first_address(upstream) == "93.184.215.14"
        assert len(silent.asked) == 1
        silent.script = lambda query, via: good(query).to_wire()
        upstream._tries_s = (20, 20)
        clock.now += 31
        await first_address(upstream)
        assert len(silent.asked) == 2
        await first_address(upstream)
        assert len(silent.asked) == 3


async def test_the_root_can_be_asked_about(resolver) -> None:
    resolver.zone[(".", "NS")] = [". 60 IN NS a.root-servers.net."]
    answer = dns.message.from_wire(await make(resolver).ask("", 2, dnssec_ok=False))
    assert answer.answer[0].name.to_text() == "."
