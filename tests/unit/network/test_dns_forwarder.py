"""What a sandbox is told about names: policies, blocked addresses, aliases, lifetimes."""

from __future__ import annotations

import asyncio
import ipaddress

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from resolver_rig import OTHER, SANDBOX, FakeResolver, Rig, addresses, exemption, policy, rrset, words

from cpuos.testing.waiting import until

NOERROR, NXDOMAIN, REFUSED, SERVFAIL = (
    dns.rcode.NOERROR,
    dns.rcode.NXDOMAIN,
    dns.rcode.REFUSED,
    dns.rcode.SERVFAIL,
)
WEB = "93.184.215.14"
ALLOW = {"allow": ["*.good.example", "one.example:8443"]}


@pytest.fixture
async def resolver():
    async with FakeResolver() as made:
        made.zone = {
            ("www.example", "A"): [f"www.example. 300 IN A {WEB}", "www.example. 300 IN A 93.184.215.15"],
            ("www.example", "TXT"): ['www.example. 300 IN TXT "hello"'],
            ("a.good.example", "A"): [f"a.good.example. 60 IN A {WEB}"],
            ("one.example", "A"): ["one.example. 60 IN A 93.184.215.20"],
            ("alias.good.example", "A"): [
                "alias.good.example. 100 IN CNAME edge.cdn.example.",
                "edge.cdn.example. 50 IN CNAME node.cdn.example.",
                f"node.cdn.example. 20 IN A {WEB}",
            ],
        }
        yield made


@pytest.fixture
async def rig(resolver):
    made = Rig(resolver)
    yield made
    for forwarder in made.forwarders.values():
        await forwarder.close()
    made.close()


async def test_internet_answers_as_the_resolver_does(rig) -> None:
    rig.add("internet")
    answer = await rig.ask("www.example")
    assert (answer.rcode(), addresses(answer)) == (NOERROR, [WEB, "93.184.215.15"])
    assert answer.flags & dns.flags.RA
    assert not answer.flags & (dns.flags.AA | dns.flags.AD)
    assert answer.edns == 0
    assert answer.authority == []
    text = await rig.ask("www.example", "TXT")
    assert text.answer[0][0].strings == (b"hello",)
    assert (await rig.ask("www.example", edns=False)).edns == -1
    assert rig.opened == []  # nothing is opened by name where names do not decide
    assert {(r["event"], r["name"], r["address"]) for r in rig.records()} == {
        ("resolved", "www.example", WEB),
        ("resolved", "www.example", "93.184.215.15"),
    }


@pytest.mark.parametrize("name", ["wWw.ExAmPlE", "www.example", "WWW.EXAMPLE"])
async def test_the_case_of_the_question_comes_back(rig, name) -> None:
    rig.add("internet")
    await rig.ask("www.example")
    assert addresses(await rig.ask(name)) == [WEB, "93.184.215.15"]
    assert len(rig.resolver.asked) == 1


# what a policy refuses


async def test_an_allowlist_asks_only_for_its_names(rig) -> None:
    rig.add(ALLOW)
    for name in ("www.example", "good.example", "x.two.example", "secret-data.evil.example"):
        for rdtype in ("A", "AAAA", "TXT", "MX", "HTTPS", "NS"):
            answer = await rig.ask(name, rdtype)
            assert answer.rcode() == REFUSED, (name, rdtype)
            assert words(answer) == (17, "cpuos network policy: not in the sandbox allow list")
    assert rig.resolver.asked == []
    assert addresses(await rig.ask("a.good.example")) == [WEB]
    assert rig.resolver.asked == [("a.good.example", "A", "udp")]
    refused = [record for record in rig.records() if record.get("verdict") == "refused"]
    assert len(refused) == 24
    assert refused[0] == {
        "sandbox": SANDBOX,
        "kind": "dns",
        "name": "www.example",
        "verdict": "refused",
        "rule": "not in the sandbox allow list",
        "at": 1000.0,
    }


async def test_off_asks_for_nothing(rig) -> None:
    rig.add("off", exemptions=[exemption("mirror.example", "10.1.2.3")])
    for name in ("www.example", "mirror.example"):
        answer = await rig.ask(name)
        assert answer.rcode() == REFUSED
        assert words(answer) == (17, "cpuos network policy: sandbox network off")
    assert rig.resolver.asked == []


async def test_deny_wins(rig) -> None:
    rig.add({"deny": ["*.example"]})
    assert words(await rig.ask("www.example")) == (17, "cpuos network policy: sandbox deny *.example")
    rig.add({"allow": ["*.good.example"], "deny": ["a.good.example"]})
    assert (await rig.ask("a.good.example")).rcode() == REFUSED
    assert rig.resolver.asked == []
    assert addresses(await rig.ask("alias.good.example")) == [WEB]


async def test_the_workspace_refuses_with_its_own_number(rig) -> None:
    rig.add("internet", workspace={"deny": ["www.example"]})
    assert words(await rig.ask("www.example")) == (15, "cpuos network policy: workspace deny www.example")


async def test_both_policies_must_allow(rig) -> None:
    rig.add({"allow": ["*.example"]}, workspace={"allow": ["*.good.example"]})
    assert (await rig.ask("www.example")).rcode() == REFUSED
    assert addresses(await rig.ask("a.good.example")) == [WEB]


async def test_without_edns_a_refusal_is_short(rig) -> None:
    rig.add("off")
    answer = await rig.ask("www.example", edns=False)
    assert (answer.rcode(), answer.edns) == (REFUSED, -1)


@pytest.mark.parametrize("rdtype", ["ANY", "AXFR", "IXFR", "NULL", "TYPE65399", "HINFO", "MAILB", "KEY", "A6", "WKS"])
async def test_types_that_carry_anything_are_refused(rig, rdtype) -> None:
    rig.add("internet")
    if rdtype in ("AXFR", "IXFR"):  # a client would ask these over TCP
        data = dns.message.make_query("www.example", "A").to_wire()
        data = data[:-4] + {"AXFR": b"\0\xfc", "IXFR": b"\0\xfb"}[rdtype] + b"\0\1"
        assert dns.message.from_wire(await rig.send(data, stream=True)).rcode() == REFUSED
    else:
        answer = await rig.ask("www.example", rdtype)
        assert answer.rcode() == REFUSED
        assert words(answer)[0] == 18
    assert rig.resolver.asked == []


async def test_other_classes_are_refused(rig) -> None:
    rig.add("internet")
    assert (await rig.ask("version.bind", "TXT", rdclass="CH")).rcode() == REFUSED
    await rig.ask("www.example")
    assert (await rig.ask("www.example", "A", rdclass="CH")).rcode() == REFUSED
    assert len(rig.resolver.asked) == 1


@pytest.mark.parametrize("rdtype", ["AAAA", "HTTPS", "SVCB"])
async def test_there_is_no_ipv6_and_no_hidden_name(rig, rdtype) -> None:
    rig.resolver.zone[("www.example", "AAAA")] = ["www.example. 60 IN AAAA ::ffff:10.0.0.1"]
    rig.resolver.zone[("www.example", "HTTPS")] = ["www.example. 60 IN HTTPS 1 . alpn=h3 ipv4hint=10.0.0.1 ech=AAAA"]
    rig.add("internet")
    answer = await rig.ask("www.example", rdtype)
    assert (answer.rcode(), answer.answer) == (NOERROR, [])
    assert answer.authority[0].rdtype == dns.rdatatype.SOA
    assert rig.resolver.asked == []


SPECIAL = [
    "localhost",
    "a.localhost",
    "printer.local",
    "_http._tcp.local",
    "metadata.google.internal",
    "instance-data.ec2.internal",
    "x.onion",
    "what.invalid",
    "host",
    "wpad.lan",
    "nas.home.arpa",
    "_dns.resolver.arpa",
    "1.0.0.10.in-addr.arpa",
    "10.in-addr.arpa",
    "254.169.254.169.in-addr.arpa",
    "169.254.169.in-addr.arpa",
    "5.16.172.in-addr.arpa",
    "0-25.1.168.192.in-addr.arpa",
    "b._dns-sd._udp.0.0.0.10.in-addr.arpa",
    "1.0.0.0.ip6.arpa",
]


@pytest.mark.parametrize("name", SPECIAL)
async def test_special_names_never_leave(rig, name) -> None:
    rig.resolver.zone[(name, "A")] = [f"{name}. 60 IN A {WEB}"]
    rig.add("internet")
    for rdtype in ("A", "AAAA", "PTR", "TXT", "SRV"):
        answer = await rig.ask(name, rdtype)
        assert (answer.rcode(), answer.answer) == (NXDOMAIN, [])
        assert words(answer)[0] == 15
        assert words(answer)[1].startswith("cpuos network policy: always blocked: ")
        assert (await rig.ask(name, rdtype, edns=False)).rcode() == NXDOMAIN
    assert rig.resolver.asked == []


async def test_only_searches_for_services_are_recorded(rig) -> None:
    rig.add("internet")
    for name in ("localhost", "host", "1.0.0.10.in-addr.arpa", "metadata.google.internal"):
        await rig.ask(name)
    assert [(r["name"], r["rule"].split(":")[0]) for r in rig.records()] == [
        ("metadata.google.internal", "always blocked")
    ]


async def test_other_reverse_zones_are_names_like_any(rig) -> None:
    name = "14.215.184.93.in-addr.arpa"
    rig.resolver.zone[(name, "PTR")] = [f"{name}. 60 IN PTR www.example."]
    rig.add("internet")
    assert (await rig.ask(name, "PTR")).answer[0][0].target.to_text() == "www.example."
    rig.add(ALLOW)
    assert (await rig.ask(name, "PTR")).rcode() == REFUSED


async def test_browsers_leave_their_own_resolver_off_where_names_decide(rig) -> None:
    name = "use-application-dns.net"
    rig.resolver.zone[(name, "A")] = [f"{name}. 60 IN A {WEB}"]
    rig.add("internet")
    assert (await rig.ask(name)).rcode() == NOERROR
    rig.add({"deny": ["bad.example"]})
    assert (await rig.ask(name)).rcode() == NXDOMAIN


@pytest.mark.parametrize(
    "name",
    ["a" * 60 + "." + "b" * 60 + "." + "c" * 60 + "." + "d" * 20 + ".good.example", "x." * 20 + "good.example"],
)
async def test_names_that_carry_data_are_refused(rig, name) -> None:
    for network in ("internet", ALLOW):
        rig.add(network)
        answer = await rig.ask(name)
        assert answer.rcode() == REFUSED
        assert words(answer) == (18, "cpuos network policy: always blocked: a name this long carries data")
    assert rig.resolver.asked == []


@pytest.mark.parametrize("label", [b"a.good", b"a b", b"a\0", b"*", b"a/b", b"\xff", b"a\\.b", b"a@b"])
async def test_a_label_is_letters_digits_and_hyphens(rig, label) -> None:
    """A dot inside a label would read as another name: `evil\\.good.example` is no name below good.example."""
    rig.add({"allow": ["*.good.example", "*.example"]})
    question = bytes([len(label)]) + label + b"\4good\7example\0\0\1\0\1"
    answer = dns.message.from_wire(await rig.send(b"\0\1\1\0\0\1\0\0\0\0\0\0" + question), ignore_trailing=True)
    assert answer.rcode() == REFUSED
    assert rig.resolver.asked == []


# blocked addresses

BLOCKED = [
    ("0.0.0.0", "this network"),
    ("10.0.0.1", "private"),
    ("100.64.0.1", "shared"),
    ("127.0.0.1", "loopback"),
    ("168.63.129.16", "cloud platform"),
    ("169.254.169.254", "link-local"),
    ("172.31.255.255", "private"),
    ("192.0.0.192", "protocol assignments"),
    ("192.168.1.1", "private"),
    ("198.18.0.1", "benchmarking"),
    ("224.0.0.251", "multicast"),
    ("255.255.255.255", "reserved"),
    ("93.184.215.99", "the host's own address"),
]


@pytest.mark.parametrize(("address", "block"), BLOCKED)
@pytest.mark.parametrize("network", ["internet", ALLOW], ids=["internet", "allowlist"])
async def test_rebinding_is_filtered(rig, network, address, block) -> None:
    rig.world.host_addresses = frozenset({ipaddress.IPv4Address("93.184.215.99")})
    rig.resolver.zone[("a.good.example", "A")] = [f"a.good.example. 0 IN A {address}"]
    rig.resolver.zone[("b.good.example", "A")] = [
        f"b.good.example. 60 IN A {address}",
        f"b.good.example. 60 IN A {WEB}",
    ]
    rig.resolver.zone[("c.good.example", "A")] = [
        "c.good.example. 60 IN CNAME inside.evil.example.",
        f"inside.evil.example. 60 IN A {address}",
    ]
    rig.add(network)
    for name in ("a.good.example", "c.good.example"):
        answer = await rig.ask(name)
        assert (answer.rcode(), answer.answer) == (REFUSED, [])
        assert words(answer) == (15, f"cpuos network policy: always blocked: {block}")
    assert addresses(await rig.ask("b.good.example")) == [WEB]
    assert {row[2] for row in rig.opened} <= {WEB}
    assert {r["rule"] for r in rig.records() if r.get("verdict")} == {f"always blocked: {block}"}


async def test_without_a_way_to_a_resolver_names_are_refused_by_that_rule(rig) -> None:
    rig.world.resolvers = (ipaddress.IPv4Address("1.1.1.1"), ipaddress.IPv4Address("9.9.9.9"))
    rig.world.reach = (ipaddress.IPv4Network("80.90.100.0/24"),)
    forwarder = rig.add(ALLOW)
    for kind in ("A", "AAAA"):
        answer = await rig.ask("a.good.example", kind)
        assert (answer.rcode(), words(answer)) == (REFUSED, (22, "cpuos network policy: no uplink"))
    assert words(await rig.ask("a.bad.example")) == (17, "cpuos network policy: not in the sandbox allow list")
    assert rig.resolver.asked == []
    assert [r["rule"] for r in rig.records()] == ["no uplink"] * 2 + ["not in the sandbox allow list"]
    rig.world.reach = (ipaddress.IPv4Network("9.9.9.9/32"),)
    forwarder.forget_answers()
    rig.resolver.zone[("a.good.example", "A")] = [f"a.good.example. 60 IN A {WEB}"]
    assert addresses(await rig.ask("a.good.example")) == [WEB]


async def test_an_address_that_becomes_the_hosts_is_filtered_at_once(rig) -> None:
    forwarder = rig.add("internet")
    assert addresses(await rig.ask("www.example")) == [WEB, "93.184.215.15"]
    rig.world.host_addresses = frozenset({ipaddress.IPv4Address(WEB)})
    forwarder.forget_answers()
    assert addresses(await rig.ask("www.example")) == ["93.184.215.15"]


async def test_records_that_were_not_asked_for_are_left_out(rig) -> None:
    def script(query, via):
        answer = rig.resolver.from_zone(query)
        answer.answer.append(rrset("other.example. 60 IN A 10.0.0.1"))
        answer.answer.append(rrset("a.good.example. 60 IN AAAA ::ffff:10.0.0.1"))
        answer.authority.append(rrset("good.example. 60 IN NS ns.good.example."))
        answer.additional.append(rrset("ns.good.example. 60 IN A 10.0.0.1"))
        return answer.to_wire()

    rig.resolver.script = script
    rig.add("internet")
    answer = await rig.ask("a.good.example")
    assert [(r.name.to_text(), r.rdtype) for r in answer.answer] == [("a.good.example.", dns.rdatatype.A)]
    assert answer.authority == answer.additional == []


# allowlist: what opens


async def test_an_address_is_open_before_it_is_told(rig) -> None:
    rig.add(ALLOW)
    order = []
    learn = rig._learn

    async def slowly(*given):
        await asyncio.sleep(0.02)
        await learn(*given)
        order.append("open")

    rig.world.learn = slowly
    assert addresses(await rig.ask("a.good.example")) == [WEB]
    order.append("told")
    assert order == ["open", "told"]
    assert rig.opened == [(SANDBOX, "a.good.example", WEB, 90)]  # 60 s, and a little more


async def test_what_cannot_be_opened_is_not_told(rig) -> None:
    rig.add(ALLOW)
    rig.learn_fails = True
    assert (await rig.ask("a.good.example")).rcode() == SERVFAIL
    rig.learn_fails = False
    assert addresses(await rig.ask("a.good.example")) == [WEB]


async def test_aliases_need_not_be_listed_and_count_for_the_asked_name(rig) -> None:
    rig.add(ALLOW)
    answer = await rig.ask("alias.good.example")
    assert [r.rdtype for r in answer.answer] == [dns.rdatatype.CNAME, dns.rdatatype.CNAME, dns.rdatatype.A]
    assert addresses(answer) == [WEB]
    assert rig.opened == [(SANDBOX, "alias.good.example", WEB, 60)]  # at least 30 s, and a little more
    assert (await rig.ask("node.cdn.example")).rcode() == REFUSED


@pytest.mark.parametrize("denied", ["edge.cdn.example", "node.cdn.example", "*.cdn.example"])
async def test_an_alias_of_a_denied_name_is_refused(rig, denied) -> None:
    rig.add({**ALLOW, "deny": [denied]})
    answer = await rig.ask("alias.good.example")
    assert words(answer) == (17, f"cpuos network policy: sandbox deny {denied}")
    assert rig.opened == []


async def test_an_alias_chain_ends(rig) -> None:
    def script(query, via):
        answer = dns.message.make_response(query)
        for here, there in (("a.good.example", "b.example"), ("b.example", "a.good.example")):
            answer.answer.append(rrset(f"{here}. 60 IN CNAME {there}."))
        return answer.to_wire()

    rig.resolver.script = script
    rig.add(ALLOW)
    assert (await rig.ask("a.good.example")).rcode() == SERVFAIL


async def test_a_name_that_moves_is_opened_at_its_new_address(rig) -> None:
    rig.add(ALLOW)
    await rig.ask("a.good.example")
    rig.resolver.zone[("a.good.example", "A")] = ["a.good.example. 60 IN A 93.184.215.77"]
    rig.clock.now += 61
    assert addresses(await rig.ask("a.good.example")) == ["93.184.215.77"]
    assert [row[2] for row in rig.opened] == [WEB, "93.184.215.77"]


async def test_ttl_zero_is_open_for_half_a_minute_and_does_not_flood_the_node(rig) -> None:
    rig.resolver.zone[("a.good.example", "A")] = [f"a.good.example. 0 IN A {WEB}"]
    rig.add(ALLOW)
    for _ in range(20):
        await rig.ask("a.good.example")
        rig.clock.now += 1
    assert len(rig.resolver.asked) == 20  # never cached
    assert rig.opened == [(SANDBOX, "a.good.example", WEB, 60)]
    rig.clock.now += 11
    await rig.ask("a.good.example")
    assert len(rig.opened) == 2


async def test_endless_addresses_fail_closed(resolver) -> None:
    """A hostile zone below an allowed wildcard must not fill the rules."""
    rig = Rig(resolver, learned=50, new_names_per_s=1e6, new_names_burst=1e6)
    rig.add(ALLOW)
    for number in range(80):
        name = f"n{number}.good.example"
        resolver.zone[(name, "A")] = [f"{name}. 3000 IN A 93.184.{number}.1"]
        rcode = (await rig.ask(name)).rcode()
        assert rcode == (NOERROR if number < 50 else SERVFAIL)
    assert len(rig.opened) == 50
    rig.clock.now += 3100
    assert (await rig.ask("n79.good.example")).rcode() == NOERROR
    rig.close()


async def test_many_addresses_of_one_name_are_cut(rig) -> None:
    rig.resolver.zone[("a.good.example", "A")] = [f"a.good.example. 60 IN A 93.184.0.{n}" for n in range(100)]
    rig.add(ALLOW)
    assert len(addresses(await rig.ask("a.good.example", stream=True))) == 32
    assert len(rig.opened) == 32


# a change of policy


async def test_a_new_policy_holds_at_once(rig) -> None:
    forwarder = rig.add("internet")
    await rig.ask("www.example")
    await rig.ask("a.good.example")
    learned = forwarder.set_policy(policy(ALLOW, version=2))
    assert ("a.good.example", ipaddress.IPv4Address(WEB), 90) in learned
    assert {name for name, _, _ in learned} == {"www.example", "a.good.example"}  # both may be open
    assert (await rig.ask("www.example")).rcode() == REFUSED
    rig.clock.now += 31
    assert ("a.good.example", ipaddress.IPv4Address(WEB), 59) in forwarder.set_policy(policy(ALLOW, version=3))
    rig.clock.now += 3600
    assert ("a.good.example", ipaddress.IPv4Address(WEB), 0) in forwarder.set_policy(policy("off", version=4))
    assert (await rig.ask("a.good.example")).rcode() == REFUSED
    forwarder.set_policy(policy("internet", version=5))
    assert addresses(await rig.ask("www.example")) == [WEB, "93.184.215.15"]


async def test_a_policy_that_changes_while_a_question_is_out(rig) -> None:
    forwarder = rig.add("internet")
    go = asyncio.Event()
    ask = rig.world.upstream.ask

    async def slowly(*given, **rest):
        answer = await ask(*given, **rest)
        await go.wait()
        return answer

    rig.world.upstream.ask = slowly
    waiting = asyncio.create_task(rig.ask("www.example"))
    await until(lambda: rig.resolver.asked)
    forwarder.set_policy(policy(ALLOW, version=2))
    go.set()
    assert (await waiting).rcode() == REFUSED
    assert rig.opened == []
    forwarder.set_policy(policy("internet", version=3))
    assert addresses(await rig.ask("www.example")) == [WEB, "93.184.215.15"]


# operator exceptions


async def test_an_operator_exception_is_answered_here(rig) -> None:
    mirrors = [exemption("mirror.internal", "10.1.2.3", 3142), exemption("mirror.internal", "10.1.2.4")]
    rig.add("internet", exemptions=mirrors)
    answer = await rig.ask("Mirror.Internal")
    assert addresses(answer) == ["10.1.2.3", "10.1.2.4"]
    assert answer.answer[0].ttl == 60
    assert [(r["name"], r["address"]) for r in rig.records()] == [
        ("mirror.internal", "10.1.2.3"),
        ("mirror.internal", "10.1.2.4"),
    ]
    for rdtype in ("AAAA", "MX", "TXT"):
        assert (await rig.ask("mirror.internal", rdtype)).rcode() == NOERROR
    assert (await rig.ask("other.internal")).rcode() == NXDOMAIN
    assert rig.resolver.asked == []


async def test_an_allowlist_must_name_an_operator_exception(rig) -> None:
    mirrors = [exemption("mirror.example", "10.1.2.3", 3142)]
    rig.add({"allow": ["other.example"]}, exemptions=mirrors)
    assert (await rig.ask("mirror.example")).rcode() == REFUSED
    rig.add({"allow": ["mirror.example:3142"]}, exemptions=mirrors)
    assert addresses(await rig.ask("mirror.example")) == ["10.1.2.3"]
    assert rig.opened == [(SANDBOX, "mirror.example", "10.1.2.3", 90)]
    assert rig.resolver.asked == []


async def test_an_exception_opens_no_other_name(rig) -> None:
    rig.resolver.zone[("www.example", "A")] = ["www.example. 60 IN A 10.1.2.3"]
    rig.add("internet", exemptions=[exemption("mirror.example", "10.1.2.3")])
    assert words(await rig.ask("www.example")) == (15, "cpuos network policy: always blocked: private")


# cache and lifetimes


async def test_lifetimes_shrink_with_age(rig) -> None:
    rig.add("internet")
    first = await rig.ask("alias.good.example")
    assert [r.ttl for r in first.answer] == [100, 50, 20]
    rig.clock.now += 7
    second = await rig.ask("alias.good.example")
    assert [r.ttl for r in second.answer] == [93, 43, 13]
    rig.clock.now += 12.5
    assert [r.ttl for r in (await rig.ask("alias.good.example")).answer] == [81, 31, 1]
    assert len(rig.resolver.asked) == 1
    rig.clock.now += 0.5
    assert [r.ttl for r in (await rig.ask("alias.good.example")).answer] == [100, 50, 20]
    assert len(rig.resolver.asked) == 2


async def test_the_longest_lifetime_is_an_hour(rig) -> None:
    rig.resolver.zone[("www.example", "A")] = [f"www.example. 86400 IN A {WEB}"]
    rig.add("internet")
    assert (await rig.ask("www.example")).answer[0].ttl == 3600
    rig.clock.now += 3599
    assert (await rig.ask("www.example")).answer[0].ttl == 1
    rig.clock.now += 1
    await rig.ask("www.example")
    assert len(rig.resolver.asked) == 2


async def test_a_no_is_kept_as_long_as_the_zone_says(rig) -> None:
    rig.add("internet")
    for _ in range(2):
        answer = await rig.ask("missing.example")
        assert answer.rcode() == NXDOMAIN
        assert answer.authority[0].rdtype == dns.rdatatype.SOA
        assert (await rig.ask("www.example", "MX")).rcode() == NOERROR
        rig.clock.now += 39
    assert len(rig.resolver.asked) == 2
    rig.clock.now += 1
    await rig.ask("missing.example")
    assert len(rig.resolver.asked) == 3


async def test_failures_are_not_kept(rig) -> None:
    rig.add("internet")
    rig.resolver.script = lambda query, via: (
        dns.message.make_response(query).to_wire()[:3] + b"\x82" + query.to_wire()[4:]
    )
    assert (await rig.ask("www.example")).rcode() == SERVFAIL
    rig.resolver.script = None
    assert addresses(await rig.ask("www.example")) == [WEB, "93.184.215.15"]


async def test_sandboxes_share_nothing(rig) -> None:
    """Neither answers nor refusals: each has its own policy, and does not see what the other has asked."""
    rig.add("internet")
    rig.add(ALLOW, sandbox=OTHER)
    for _ in range(2):
        assert (await rig.ask("www.example")).rcode() == NOERROR
        assert (await rig.ask("www.example", sandbox=OTHER)).rcode() == REFUSED
        assert (await rig.ask("a.good.example")).rcode() == NOERROR
        assert (await rig.ask("a.good.example", sandbox=OTHER)).rcode() == NOERROR
    assert rig.resolver.asked == [
        ("www.example", "A", "udp"),
        ("a.good.example", "A", "udp"),
        ("a.good.example", "A", "udp"),
    ]
    assert [row[0] for row in rig.opened] == [OTHER]


async def test_answers_differ_by_edns_size_and_dnssec(rig) -> None:
    rig.resolver.zone[("big.example", "A")] = [f"big.example. 60 IN A 93.184.0.{n}" for n in range(31)]
    rig.resolver.zone[("big.example", "TXT")] = [f'big.example. 60 IN TXT "{"x" * 200}{n}"' for n in range(20)]
    rig.add("internet")
    small = await rig.ask("big.example", edns=False)
    assert small.flags & dns.flags.TC
    assert small.answer == []
    assert len(addresses(await rig.ask("big.example", edns=False, stream=True))) == 31
    assert len(addresses(await rig.ask("big.example", payload=1232))) == 31
    cut = await rig.ask("big.example", payload=512)
    assert cut.flags & dns.flags.TC
    assert cut.edns == 0
    assert (await rig.ask("big.example", "TXT", payload=65535)).flags & dns.flags.TC  # never over 1232 by UDP
    whole = await rig.ask("big.example", "TXT", stream=True)
    assert len(whole.answer[0]) == 20
    asked = len(rig.resolver.asked)
    secure = await rig.ask("big.example", want_dnssec=True)
    assert secure.ednsflags & dns.flags.DO
    assert len(rig.resolver.asked) == asked + 1
    assert not (await rig.ask("big.example")).ednsflags & dns.flags.DO


async def test_signatures_come_only_when_asked_for(rig) -> None:
    signed = f"www.example. 300 IN RRSIG A 8 2 300 20300101000000 20200101000000 1 example. {'A' * 16}"
    rig.resolver.zone[("www.example", "A")].append(signed)
    rig.add("internet")
    assert [r.rdtype for r in (await rig.ask("www.example")).answer] == [dns.rdatatype.A]
    secure = await rig.ask("www.example", want_dnssec=True)
    assert [r.rdtype for r in secure.answer] == [dns.rdatatype.A, dns.rdatatype.RRSIG]


async def test_equal_questions_are_asked_once(rig) -> None:
    rig.add("internet")
    answers = await asyncio.gather(*(rig.ask("www.example") for _ in range(50)))
    assert {tuple(addresses(answer)) for answer in answers} == {(WEB, "93.184.215.15")}
    assert len(rig.resolver.asked) == 1


async def test_the_cache_has_an_end(resolver) -> None:
    rig = Rig(resolver, cache_entries=10, new_names_per_s=1e6, new_names_burst=1e6)
    forwarder = rig.add("internet")
    for number in range(30):
        name = f"n{number}.example"
        resolver.zone[(name, "TXT")] = [f'{name}. 60 IN TXT "{"x" * 100}"']
        await rig.ask(name, "TXT")
    cache = forwarder._cache
    assert len(cache) == 10
    assert 10 * 100 < cache.size_bytes < 10 * 300
    await rig.ask("n29.example", "TXT")
    assert len(resolver.asked) == 30
    await rig.ask("n0.example", "TXT")
    assert len(resolver.asked) == 31
    cache.clear()
    assert cache.size_bytes == 0
    rig.close()


# limits


async def test_new_names_have_a_rate(resolver) -> None:
    """What a tunnel through names is left with; answers from the cache are not counted."""
    rig = Rig(resolver, new_names_per_s=10, new_names_burst=20)
    rig.add("internet")
    rcodes = [(await rig.ask(f"x{number}.example")).rcode() for number in range(40)]
    assert rcodes == [NXDOMAIN] * 20 + [SERVFAIL] * 20
    assert "too many new names" in words(await rig.ask("y.example"))[1]
    for _ in range(50):
        assert (await rig.ask("x3.example")).rcode() == NXDOMAIN
    rig.clock.now += 1
    rcodes = [(await rig.ask(f"z{number}.example")).rcode() for number in range(40)]
    assert 9 <= rcodes.count(NXDOMAIN) <= 11
    rig.close()


async def test_questions_in_flight_have_an_end(resolver) -> None:
    rig = Rig(resolver, tries_s=[0.5], in_flight=8, waiting=12)
    rig.world.most_in_flight = 10
    rig.add("internet")
    rig.add("internet", sandbox=OTHER)
    resolver.script = lambda query, via: None
    asked = [rig.ask(f"x{n}.example") for n in range(20)]
    asked += [rig.ask(f"x{n}.example", sandbox=OTHER) for n in range(20)]
    asked += [rig.ask("x1.example") for _ in range(20)]
    answers = await asyncio.gather(*asked)
    assert {answer.rcode() for answer in answers} == {SERVFAIL}
    texts = [words(answer)[1] for answer in answers]
    assert len([text for text in texts if "no resolver answered" in text]) == 8 + 2 + 4
    assert len(resolver.asked) == 10
    assert rig.world.in_flight == 0
    rig.close()


async def test_records_that_cannot_be_delivered_are_counted(rig) -> None:
    rig.add("off")
    for _ in range(3000):
        await rig.ask("www.example")
    kept = len(rig.records())
    assert 0 < kept < 3000
    await rig.ask("www.example")
    lost, last = rig.records()
    assert lost == {"sandbox": last["sandbox"], "event": "lost", "count": 3000 - kept}
    assert last["name"] == "www.example"
