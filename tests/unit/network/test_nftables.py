"""libnftables in this process, and scripts that nobody's text gets into."""

from __future__ import annotations

import os
import re
import socket
import threading
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from cpuos.errors import PlatformError
from cpuos.node import syscalls
from cpuos.node.network.namespaces import in_fresh_thread, inside, keep_namespace, new_namespace, release_namespace
from cpuos.node.network.netlink import RouteNetlink
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.plan import BlockPlan
from cpuos.node.network.policy_rules import NamedAddress, learn_rules, name_set_names, policy_rules
from cpuos.node.network.rules import base_rules, host_rules
from cpuos.node.network.surroundings import Surroundings
from router_world import judge

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def namespace(tmp_path):
    path = tmp_path / "one"
    in_fresh_thread(lambda: (os.close(new_namespace()), keep_namespace(path)))
    yield path
    release_namespace(path)


@needs_root
def test_a_context_stays_in_its_namespace(namespace):
    context = inside(namespace, NftContext)
    try:
        inside(namespace, lambda: context.run("table ip one { }"))
        assert _tables(namespace) == ["one"]
        assert "one" not in _tables(Path("/proc/self/ns/net"))
    finally:
        context.close()
        context.close()


@needs_root
def test_all_or_nothing(namespace):
    context = inside(namespace, NftContext)
    try:
        with pytest.raises(PlatformError) as raised:
            inside(namespace, lambda: context.run("table ip one { }\nadd rule ip one missing accept\n"))
        assert raised.value.what == "cannot apply nft rules"
        assert "missing" in raised.value.why
        assert _tables(namespace) == []
        inside(namespace, lambda: context.run("table ip two { }"))
        assert _tables(namespace) == ["two"], "an error before leaves the context usable"
    finally:
        context.close()


@needs_root
@pytest.mark.parametrize("script", ["nonsense", "add rule ip x y accept", "\0", "{", '"', "add table ip x\nadd"])
def test_what_is_wrong_is_said(namespace, script):
    def work():
        context = NftContext()
        try:
            context.run(script)
        finally:
            context.close()

    if script == "\0":
        inside(namespace, work)  # ends there: nothing is asked
        return
    with pytest.raises(PlatformError) as raised:
        inside(namespace, work)
    assert raised.value.why
    assert len(raised.value.why) <= 600


@needs_root
def test_a_closed_context_says_so(namespace):
    context = inside(namespace, NftContext)
    context.close()
    with pytest.raises(PlatformError, match="cannot run nft rules"):
        context.run("list tables")


@needs_root
def test_closing_lets_the_namespace_go(tmp_path):
    """An open context would hold it, and with it the links of the slot."""
    path = tmp_path / "one"
    in_fresh_thread(lambda: (os.close(new_namespace()), keep_namespace(path)))
    before = len(os.listdir("/proc/self/fd"))
    context = inside(path, NftContext)
    assert len(os.listdir("/proc/self/fd")) > before
    context.close()
    assert len(os.listdir("/proc/self/fd")) == before
    release_namespace(path)


@needs_root
def test_many_threads_at_once(tmp_path):
    """The node changes many sandboxes at a time."""
    problems = []

    def work(number):
        try:
            syscalls.unshare(syscalls.CLONE_NEWNET)
            context = NftContext()
            for turn in range(20):
                context.run(f"table ip t{number}_{turn} {{ }}")
            listed = [entry for entry in context.query("list tables") if "table" in entry]
            assert {entry["table"]["name"] for entry in listed} == {f"t{number}_{turn}" for turn in range(20)}
            context.close()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


VOCABULARY = """
accept accepted add answer burst chain counter cpuos daddr delete dport element elements flags flush goto group host
ip ipv4_addr l4proto layers limit limited log mark meta name open outside packets prefix queue-threshold rate
refused return rule set size snaplen tcp th timeout type udp
"""
NUMBERS = re.compile(
    r"""\d+(-\d+)?s?|\d+/second|(\d{1,3}\.){3}\d{1,3}(/\d{1,2})?|layer_\d|@?(named|denied)_\d+_\d+_\d+
    |"[ad]|\d+"|limit"|"(allowed|refused|limited)\"""",
    re.VERBOSE,
)


def _assert_plain(script: str) -> None:
    words, known = re.sub(r"[{},;=]", " ", script).split(), set(VOCABULARY.split())
    assert not [word for word in words if word not in known and not NUMBERS.fullmatch(word)]


@given(policies.layers(), policies.learned())
def test_scripts_are_made_of_words_and_numbers(layers, learned):
    one = judge(*layers)
    _assert_plain(policy_rules(one, generation=3, learned=learned, replaced=name_set_names(one, 2)))
    _assert_plain(learn_rules(one, learned, generation=3))


@given(st.text(max_size=80), st.text(max_size=80))
def test_nobodys_text_gets_into_a_script(allowed, denied):
    """Either it is no target, or the script has nothing of it but addresses and ports."""
    try:
        one = judge({"mode": "allowlist", "allow": [allowed], "deny": [denied]})
    except ValueError:
        return
    learned = [NamedAddress(name=allowed, address=IPv4Address("1.2.3.4"), ttl_s=10)]
    _assert_plain(policy_rules(one, generation=1, learned=learned))


EVIL = [
    "1.2.3.4 accept\nadd rule ip cpuos forward accept",
    "a.test } ; flush ruleset",
    '1.2.3.4"; flush ruleset #',
    "$x",
    "@blocked",
]


@pytest.mark.parametrize("evil", EVIL)
def test_a_target_with_rules_in_it_is_none(evil):
    with pytest.raises(ValueError):
        judge({"allow": [evil]})


ADDRESSES = st.lists(st.integers(0, 2**32 - 1).map(IPv4Address), max_size=5).map(tuple)


@given(ADDRESSES, ADDRESSES)
def test_host_rules(addresses, reach):
    script = host_rules(Surroundings(addresses=addresses, reach=tuple(map(IPv4Network, reach))))
    assert script.startswith("flush set ip cpuos host\n")
    assert "flush set ip cpuos outside\n" in script
    _assert_plain(script)
    assert all(str(address) in script for address in (*addresses, *reach))


def test_the_largest_policy_there_can_be(tmp_path):
    """256 targets a list, each with ports of its own: still one transaction, and bounded."""
    allow = [f"93.184.{n}.0/24:{n + 1}-{n + 300}" for n in range(128)] + [f"n{n}.test:{n + 1}" for n in range(128)]
    deny = [f"94.184.{n}.0/24:{n + 1}" for n in range(256)]
    one = judge(*[{"mode": "allowlist", "allow": allow, "deny": deny}] * 4)
    script = policy_rules(one, generation=1)
    assert len(script) < 400_000
    if os.geteuid() == 0:
        in_fresh_thread(lambda: _load_all(script))


def _load_all(script: str) -> None:
    syscalls.unshare(syscalls.CLONE_NEWNET)
    with RouteNetlink() as links:
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        links.add_veth("lan", mac="02:00:0a:00:00:01", peer="eth0", peer_mac="02:00:0a:00:00:02", peer_netns=own)
        os.close(own)
    context = NftContext()
    try:
        context.run(base_rules(BlockPlan(network=IPv4Network("10.231.0.0/20")).slot(0)))
        context.run(script)
    finally:
        context.close()


def _tables(namespace: Path) -> list[str]:
    def work():
        context = NftContext()
        try:
            return [entry["table"]["name"] for entry in context.query("list tables") if "table" in entry]
        finally:
            context.close()

    return inside(namespace, work)


def test_interfaces_of_the_machine_are_left_alone():
    assert "lan" not in {name for _, name in socket.if_nameindex()}
