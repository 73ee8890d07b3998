"""A policy changes while connections are open: what it no longer allows ends with the next packet, the rest goes on."""

from __future__ import annotations

import os
import socket
import time
from ipaddress import IPv4Address, IPv4Network

import pytest

from cpuos.errors import PlatformError
from cpuos.node.network.policy_rules import NamedAddress
from cpuos.node.network.router import Router
from cpuos.node.network.rules import GUEST_FLOW, NODE_FLOW, PEEK_FLOW, base_rules, base_stamp
from cpuos.node.network.surroundings import Surroundings
from cpuos.types.blocked import Exemption
from router_world import AMPLE, PLAN, RouterWorld, judge, router_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ONE, OTHER, PORT = "93.184.215.14", "93.184.216.99", 8080
TO_ONE = NamedAddress(name="one.test", address=IPv4Address(ONE), ttl_s=300)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with router_world(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(world):
    world.apply("internet")
    world.fresh()


def no_names(address: IPv4Address) -> tuple[str, ...]:
    return ()


def open_connection(world: RouterWorld, address: str, port: int = PORT) -> socket.socket:
    made = world.guest_socket()
    made.connect((address, port))
    assert talk(made) == b"hello"
    return made


def talk(one: socket.socket) -> bytes:
    one.sendall(b"hello")
    return one.recv(100)


def change(world: RouterWorld, *layers, names_of=no_names, **named):
    made = world.apply(*layers, **named)
    return world.router.cut(made, names_of)


def test_a_refused_connection_ends_within_a_packet_and_others_go_on(world):
    with world.server(PORT), open_connection(world, ONE) as one, open_connection(world, OTHER) as other:
        cut = change(world, {"deny": [f"{ONE}:{PORT}"]})
        assert [(str(flow.address), flow.port, flow.protocol) for flow in cut] == [(ONE, PORT, "tcp")]
        with pytest.raises(ConnectionResetError):
            talk(one)
        assert talk(other) == b"hello"
        assert world.connect(ONE, PORT) == "Connection refused"
        assert world.connect(OTHER, PORT) == "connected"


def test_off_cuts_everything_of_the_guest_and_nothing_of_the_node(world):
    """The node's connection to the agent goes on, also while only the guest talks."""
    listener = world.in_guest(lambda: socket.create_server(("10.0.0.2", 1)))
    nodes = world.in_router(lambda: socket.create_connection(("10.0.0.2", 1)))
    with world.server(PORT), listener, nodes, open_connection(world, ONE) as one, open_connection(world, OTHER) as two:
        agents, _ = listener.accept()
        with agents:
            assert len(change(world, "internet", "off")) == 2
            for made in (one, two):
                with pytest.raises(ConnectionResetError):
                    talk(made)
            for sender, receiver in ((agents, nodes), (nodes, agents)):
                sender.sendall(b"still here")
                assert receiver.recv(100) == b"still here"
            assert [flow.mark for flow in world.router.flows() if flow.port == 1] == [NODE_FLOW]


def test_udp_is_judged_anew(world):
    with world.guest_socket(socket.SOCK_DGRAM) as one:
        one.connect((ONE, PORT))
        one.send(b"x")
        one.send(b"x")
        assert len(world.arrived()) == 2
        assert len(change(world, {"allow": [OTHER]})) == 1
        one.send(b"x")
        with pytest.raises(ConnectionRefusedError):
            one.recv(1)
        assert world.arrived() == []


def test_a_datagram_more_of_the_same_flow_is_no_new_connection(world):
    before = world.router.counters().allowed
    with world.guest_socket(socket.SOCK_DGRAM) as one:
        for _ in range(50):
            one.sendto(b"x", (ONE, PORT))
    world.settle()
    assert world.router.counters().allowed - before == 1


def test_a_connection_stays_where_its_name_is_allowed(world):
    """From internet to a list of names: what is known to be allowed goes on."""
    with world.server(443), open_connection(world, ONE, 443) as one, open_connection(world, OTHER, 443) as other:
        names = {IPv4Address(ONE): ["one.test"]}
        cut = change(world, {"allow": ["*.test"]}, names_of=lambda address: names.get(address, ()), learned=[TO_ONE])
        assert [str(flow.address) for flow in cut] == [OTHER]
        assert talk(one) == b"hello"
        with pytest.raises(ConnectionResetError):
            talk(other)


@pytest.mark.parametrize(("names", "stays"), [([], False), (["good.test"], True), (["good.test", "bad.test"], False)])
def test_a_denied_name_cuts_what_could_be_it(world, names, stays):
    with world.server(443), open_connection(world, ONE, 443) as one:
        change(world, {"deny": ["bad.test"]}, names_of=lambda address: names)
        if stays:
            assert talk(one) == b"hello"
        else:
            with pytest.raises(ConnectionResetError):
                talk(one)


def test_a_peeked_connection_is_the_peeks_to_judge_while_its_address_is_open(world):
    world.apply({"allow": ["one.test"]}, learned=[TO_ONE])
    with open_peeked(world) as (guests, peeks):
        assert (
            change(world, {"allow": ["one.test", "two.test"]}, names_of=lambda _: ["one.test"], learned=[TO_ONE]) == []
        )
        guests.sendall(b"still")
        assert peeks.recv(100) == b"still"
        cut = change(world, {"allow": ["two.test"]}, names_of=lambda _: ["one.test"])
        assert [(str(flow.address), flow.port) for flow in cut] == [(ONE, 443)]
        guests.sendall(b"more")
        with pytest.raises(ConnectionResetError):
            guests.recv(1)


def test_what_the_peek_dialled_is_cut_like_the_guests_own(world):
    world.apply({"allow": ["one.test"]}, learned=[TO_ONE])
    with world.server(443), world.router.peek_sockets(1)[0] as dialled:
        dialled.settimeout(20)
        dialled.connect((ONE, 443))
        assert talk(dialled) == b"hello"
        cut = change(world, "off", names_of=lambda _: ["one.test"])
        assert [flow.mark for flow in cut] == [PEEK_FLOW]
        with pytest.raises(OSError):
            talk(dialled)


def test_a_name_opens_its_address_for_its_time_only(world):
    world.apply({"allow": ["one.test:8080/udp"]})
    assert sends(world) == 0
    in_time = False
    while not in_time:  # else a machine that stood still has seen its end
        learned_at = time.monotonic()
        world.router.learn([NamedAddress(name="one.test", address=IPv4Address(ONE), ttl_s=1)])
        sent = sends(world)
        in_time = time.monotonic() - learned_at < 1
    assert sent == 1
    world.router.learn([NamedAddress(name="one.test", address=IPv4Address(ONE), ttl_s=60)])
    time.sleep(1.2)  # the kernel's own clock
    assert sends(world) == 1, "a later answer makes it longer"
    world.router.learn([NamedAddress(name="one.test", address=IPv4Address(ONE), ttl_s=1)])
    time.sleep(1.2)
    assert sends(world) == 0


def sends(world: RouterWorld) -> int:
    """How many of one datagram arrive."""
    world.fresh()
    with world.guest_socket(socket.SOCK_DGRAM) as one:
        one.sendto(b"x", (ONE, PORT))
    return len(world.arrived())


def test_many_names_at_once_and_again(world):
    world.apply({"allow": ["*.test"]})
    many = [
        NamedAddress(name=f"n{number}.test", address=IPv4Address("93.0.0.0") + number, ttl_s=60 + number % 7)
        for number in range(2000)
    ]
    world.router.learn(many)
    world.router.learn([*many, *many[:5]])
    assert world.connect("93.0.7.207", 443) == "connected"  # to the peek's backlog
    assert world.connect("93.0.7.208", 443) == "Connection refused"


def test_a_full_set_is_an_error_and_changes_nothing(tmp_path):
    with router_world(tmp_path) as world:
        router = Router.open(world.router_path, named_addresses=2)
        try:
            router.apply(judge({"allow": ["*.test"]}))
            router.learn([NamedAddress(name="a.test", address=IPv4Address(f"93.0.0.{n}"), ttl_s=60) for n in (1, 2)])
            with pytest.raises(PlatformError, match="cannot apply nft rules"):
                router.learn([NamedAddress(name="b.test", address=IPv4Address("93.0.0.3"), ttl_s=60)])
            assert world.connect("93.0.0.2", 443) == "connected"
            assert world.connect("93.0.0.3", 443) == "Connection refused"
        finally:
            router.close()


def test_a_second_daemon_takes_over(tmp_path):
    """What holds goes on holding; its sets of names are found and replaced."""
    with router_world(tmp_path) as world:
        world.apply({"allow": ["one.test"]}, learned=[TO_ONE])
        world.router.close()
        later = Router.open(world.router_path)
        try:
            assert world.connect(ONE, 443) == "connected"
            with pytest.raises(PlatformError, match="no policy"):
                later.learn([TO_ONE])
            later.apply(judge({"allow": ["two.test"]}, version=2))
            assert world.connect(ONE, 443) == "Connection refused"
            sets = later._nft.query("list sets table ip cpuos")  # still the namespace's, whoever asks
            assert len([entry for entry in sets if entry.get("set", {}).get("name", "").startswith("named_")]) == 1
        finally:
            later.close()


def test_a_later_daemon_with_other_base_rules_puts_them_in(tmp_path):
    """Of a new version, or with another exception: in one step with the policy, and only where they differ."""
    exemption = Exemption(name="mirror.test", address=IPv4Address("10.77.0.5"), port=PORT)
    with router_world(tmp_path) as world, world.server(PORT):
        world.apply({"allow": [ONE, "two.test"]})
        with open_connection(world, ONE) as one:
            before = world.router.counters()
            world.router.apply(judge({"allow": [ONE, "two.test"]}, version=2), base=base_rules(PLAN, limits=AMPLE))
            assert world.router.counters() == before, "these are there"
            host = Surroundings(addresses=(IPv4Address("5.5.5.5"),))
            other = base_rules(PLAN, limits=AMPLE, exemptions=[exemption], surroundings=host)
            world.router.apply(judge({"deny": ["9.9.9.9"]}, version=3), base=other)
            assert world.router.counters().allowed == 0
            assert talk(one) == b"hello"
        assert world.connect("10.77.0.5", PORT) == "connected"
        assert world.connect("9.9.9.9", PORT) == "Connection refused"
        assert world.connect("5.5.5.5", PORT) == "Connection refused"
        with_other_hosts = base_rules(PLAN, limits=AMPLE, exemptions=[exemption])
        assert base_stamp(with_other_hosts) == base_stamp(other) != base_stamp(base_rules(PLAN, limits=AMPLE))


def test_hosts_own_addresses_follow(world):
    with world.server(PORT), open_connection(world, ONE) as one:
        world.router.set_surroundings(Surroundings(addresses=(IPv4Address(ONE),)))
        try:
            assert world.connect(ONE, PORT) == "Connection refused"
            assert [str(flow.address) for flow in world.router.cut(judge("internet"), no_names)] == [ONE]
            with pytest.raises(ConnectionResetError):
                talk(one)
        finally:
            world.router.set_surroundings(Surroundings())
        assert world.connect(ONE, PORT) == "connected"


def test_what_the_host_has_no_way_to_is_refused(world):
    """Whatever the policy says, and whether it is known by address or by name; what is open stays as it is."""
    near = IPv4Network(f"{ONE}/32")
    with world.server(PORT), open_connection(world, ONE) as one:
        try:
            world.router.set_surroundings(Surroundings(reach=(near,)))
            assert world.connect(ONE, PORT) == "connected"
            assert world.connect(OTHER, PORT) == "Connection refused"
            world.router.set_surroundings(Surroundings(reach=()))
            before = world.router.counters()
            assert world.connect(ONE, PORT) == "Connection refused"
            assert talk(one) == b"hello"
            after = world.router.counters()
            assert (after.refused - before.refused, after.allowed) == (1, before.allowed)
            world.apply({"allow": [ONE, "one.test"]}, version=2)
            world.router.learn([NamedAddress(name="one.test", address=IPv4Address(ONE), ttl_s=60)])
            assert world.connect(ONE, 443) == "Connection refused"
            assert world.router.counters().peeked == before.peeked
        finally:
            world.router.set_surroundings(Surroundings())
            world.apply("internet", version=3)
        assert world.connect(OTHER, PORT) == "connected"


def test_closed_is_closed(tmp_path):
    with router_world(tmp_path) as world:
        world.router.close()
        world.router.close()
        with pytest.raises(PlatformError, match="closed"):
            world.router.counters()


def test_nothing_passes_before_a_policy(tmp_path):
    with router_world(tmp_path) as world, world.server(PORT):
        assert world.connect(ONE, PORT) == "Connection refused"
        assert world.router.flows() == []


class open_peeked:
    """A guest's connection in the hands of a peek."""

    def __init__(self, world: RouterWorld) -> None:
        self._guest = world.guest_socket()
        self._guest.connect((ONE, 443))
        world.peek.settimeout(20)
        while True:  # earlier tests left some in the backlog
            self._peek, address = world.peek.accept()
            if address == self._guest.getsockname():
                break
            self._peek.close()
        [flow] = [flow for flow in world.router.flows() if flow.source_port == address[1]]
        assert (flow.mark, str(flow.answered_by), str(flow.address)) == (GUEST_FLOW, "10.0.0.1", ONE)

    def __enter__(self) -> tuple[socket.socket, socket.socket]:
        return self._guest, self._peek

    def __exit__(self, *raised: object) -> None:
        self._guest.close()
        self._peek.close()
