"""What a policy says of names and destinations: tables, and what holds for all policies."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from cpuos.node.network.judge import BYPASSES, Passage
from router_world import judge

WEB = IPv4Address("93.184.215.14")


def destination(one, port=443, protocol="tcp", names=(), address=WEB):
    return one.destination(address, protocol=protocol, port=port, names=names)


def passage(one, port=443, protocol="tcp", names=(), address=WEB):
    return one.passage(address, protocol=protocol, port=port, names=names)


@pytest.mark.parametrize(
    ("layers", "names", "port", "rule"),
    [
        (["internet"], [], 443, "internet"),
        (["internet", "internet"], [], 443, "internet"),
        ([{"allow": ["*.a.test"]}], ["x.a.test"], 443, "sandbox allow *.a.test"),
        ([{"allow": ["93.184.215.0/24:443"]}], [], 443, "sandbox allow 93.184.215.0/24:443"),
        (["internet", {"allow": ["a.test"]}], ["a.test"], 80, "sandbox allow a.test"),
        ([{"allow": ["a.test"]}, "internet"], ["a.test"], 80, "workspace allow a.test"),
        ([{"allow": ["*.test"]}, {"allow": ["a.test"]}], ["a.test"], 443, "sandbox allow a.test"),
        ([{"deny": ["9.9.9.9"]}], [], 443, "internet"),
    ],
)
def test_allows(layers, names, port, rule):
    judgement = destination(judge(*layers), port, names=names)
    assert (judgement.allowed, judgement.rule) == (True, rule)


@pytest.mark.parametrize(
    ("layers", "names", "port", "rule"),
    [
        (["off"], [], 443, "sandbox network off"),
        (["off", "internet"], [], 443, "workspace network off"),
        (["internet", "off"], [], 443, "sandbox network off"),
        ([{"allow": ["a.test"]}], [], 443, "not in the sandbox allow list"),
        ([{"allow": ["a.test"]}], ["a.test"], 22, "not in the sandbox allow list"),
        ([{"allow": ["*.a.test"]}], ["a.test"], 443, "not in the sandbox allow list"),
        ([{"allow": ["a.test"]}, {"allow": ["b.test"]}], ["a.test"], 443, "not in the sandbox allow list"),
        ([{"allow": ["a.test"]}, {"allow": ["b.test"]}], ["b.test"], 443, "not in the workspace allow list"),
        ([{"allow": ["a.test"], "deny": ["a.test"]}], ["a.test"], 443, "sandbox deny a.test"),
        ([{"deny": ["a.test"]}, {"allow": ["a.test"]}], ["a.test"], 443, "workspace deny a.test"),
        ([{"allow": ["0.0.0.0/0"]}, {"deny": [f"{WEB}:443"]}], [], 443, f"sandbox deny {WEB}:443"),
        ([{"deny": ["a.test"]}], ["b.test", "a.test"], 443, "sandbox deny a.test"),
    ],
)
def test_refuses(layers, names, port, rule):
    judgement = destination(judge(*layers), port, names=names)
    assert (judgement.allowed, judgement.rule) == (False, rule)
    assert passage(judge(*layers), port, names=names) is not Passage.DIRECT


@pytest.mark.parametrize(("protocol", "port"), BYPASSES)
def test_ways_around_the_names_are_closed_where_names_decide(protocol, port):
    def allowed(*layers):
        return destination(judge(*layers), port, protocol, names=["a.test"]).allowed

    named = f"a.test:{port}/{protocol}"
    assert allowed("internet")
    assert allowed({"deny": ["9.9.9.9"]})
    assert not allowed({"deny": ["b.test"]})
    assert not allowed({"allow": [named]})
    assert allowed({"allow": [f"{WEB}:{port}"]})
    assert not allowed({"allow": [str(WEB)]}, {"allow": [named]})
    assert not allowed({"deny": ["b.test"]}, {"allow": ["0.0.0.0/0"]}), "a narrower policy must not undo a denied name"
    assert allowed({"allow": [str(WEB)], "deny": ["b.test"]}), "the same policy names the address itself"


@pytest.mark.parametrize(
    ("layers", "name", "allowed"),
    [
        (["internet"], "any.test", True),
        (["off"], "any.test", False),
        ([{"deny": ["*.a.test"]}], "x.a.test", False),
        ([{"deny": ["*.a.test"]}], "a.test", True),
        ([{"deny": ["a.test:443"]}], "a.test", True),
        ([{"deny": ["a.test/udp"]}], "a.test", True),
        ([{"allow": ["a.test"]}], "A.test.", True),
        ([{"allow": ["a.test:22"]}], "a.test", True),
        ([{"allow": ["a.test"]}], "b.test", False),
        ([{"allow": [str(WEB)]}], "a.test", False),
        ([{"allow": ["*.test"]}, {"allow": ["a.test"], "deny": ["*.a.test"]}], "a.test", True),
        ([{"allow": ["*.test"]}, {"allow": ["*.test"], "deny": ["*.a.test"]}], "x.a.test", False),
    ],
)
def test_names_that_may_be_asked_for(layers, name, allowed):
    assert judge(*layers).name(name).allowed is allowed


@pytest.mark.parametrize(
    ("layers", "ports"),
    [
        (["internet"], []),
        ([{"deny": ["b.test"]}], []),
        ([{"allow": ["a.test"]}], [("tcp", 80, 80), ("tcp", 443, 443)]),
        ([{"allow": ["a.test", "*.test:1-5/udp"]}], [("tcp", 80, 80), ("tcp", 443, 443), ("udp", 1, 5)]),
        ([{"allow": ["a.test:1-100"]}, {"allow": ["a.test"]}], [("tcp", 80, 80)]),
        ([{"allow": ["a.test"]}, {"allow": ["b.test"]}], []),
        ([{"allow": ["a.test"], "deny": ["a.test"]}], []),
        ([{"allow": ["a.test"]}, "off"], []),
    ],
)
def test_ports_of_a_name(layers, ports):
    assert judge(*layers).name_ports("a.test") == ports


@pytest.mark.parametrize(
    ("layers", "follows"),
    [
        (["internet"], False),
        ([{"deny": ["a.test:22"]}], True),
        ([{"deny": ["b.test"]}], False),
        ([{"allow": ["*.test"]}], True),
        ([{"allow": ["1.2.3.4"]}], False),
    ],
)
def test_names_whose_addresses_the_rules_need(layers, follows):
    assert judge(*layers).follows("A.test.") is follows


@pytest.mark.parametrize(
    ("layers", "port", "names", "expected"),
    [
        (["internet"], 443, [], Passage.DIRECT),
        ([{"deny": ["b.test"]}], 443, [], Passage.PEEKED),
        ([{"deny": ["b.test"]}], 443, ["b.test"], Passage.PEEKED),  # the address may have other names
        ([{"deny": ["b.test:80"]}], 443, [], Passage.DIRECT),
        ([{"deny": ["b.test"]}], 22, [], Passage.DIRECT),
        ([{"deny": ["b.test"]}], 22, ["b.test"], Passage.REFUSED),
        ([{"allow": ["a.test"]}], 443, [], Passage.REFUSED),
        ([{"allow": ["a.test"]}], 443, ["a.test"], Passage.PEEKED),
        ([{"allow": ["a.test:22"]}], 22, ["a.test"], Passage.PEEKED),
        ([{"allow": [str(WEB)]}], 443, ["a.test"], Passage.DIRECT),
        ([{"allow": ["a.test", str(WEB)]}], 443, ["a.test"], Passage.DIRECT),
        ([{"deny": ["b.test"]}, {"allow": ["0.0.0.0/0"]}], 443, [], Passage.PEEKED),
        ([{"allow": [str(WEB)]}, {"allow": ["a.test"]}], 443, ["a.test"], Passage.PEEKED),
        (["off"], 443, [], Passage.REFUSED),
    ],
)
def test_what_the_kernel_does(layers, port, names, expected):
    assert passage(judge(*layers), port, names=names) is expected


cases = {
    "layers": policies.layers(),
    "names": st.lists(st.sampled_from(policies.NAMES), max_size=2),
    "address": st.sampled_from(policies.PUBLIC),
    "where": st.one_of(
        st.tuples(st.sampled_from(["tcp", "udp"]), st.sampled_from(policies.PORTS)), st.just(("icmp", None))
    ),
}


@given(**cases)
def test_every_layer_has_its_say(layers, names, address, where):
    """A destination is allowed by all together only where each would allow it alone."""
    protocol, port = where
    together = destination(judge(*layers), port, protocol, names, address).allowed
    alone = [destination(judge(layer), port, protocol, names, address).allowed for layer in layers]
    assert together == all(alone)


@given(**cases, further=policies.policies())
def test_a_further_layer_opens_nothing(layers, names, address, where, further):
    protocol, port = where
    if destination(judge(*layers, further), port, protocol, names, address).allowed:
        assert destination(judge(*layers), port, protocol, names, address).allowed
    before = passage(judge(*layers), port, protocol, names, address)
    after = passage(judge(*layers, further), port, protocol, names, address)
    order = [Passage.REFUSED, Passage.PEEKED, Passage.DIRECT]
    assert order.index(after) <= order.index(before)


@given(**cases)
def test_kernel_and_peek_together_open_what_the_judge_allows(layers, names, address, where):
    """What goes straight through is allowed; what is allowed goes through, or to the peek, who knows the name then."""
    protocol, port = where
    one = judge(*layers)
    allowed = destination(one, port, protocol, names, address).allowed
    way = passage(one, port, protocol, names, address)
    assert way is not Passage.DIRECT or allowed
    assert way is not Passage.REFUSED or not allowed
    assert way is not Passage.PEEKED or protocol == "tcp"


@given(policies.policies(), st.sampled_from(policies.NAMES))
def test_a_name_with_ports_may_be_asked_for(policy, name):
    one = judge(policy)
    for protocol, first, last in one.name_ports(name):
        assert one.name(name).allowed
        assert first <= last
        denied = [t for layer in one.layers for t in layer.deny if t.covers_name(name) or t.network is not None]
        if not denied and (protocol, first) not in BYPASSES:
            assert destination(one, first, protocol, [name]).allowed
