"""The uplink in user space behind routers, and then a hub, that let everything pass, as if they had been overcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from cpuos.node.network.conntrack import ConntrackSocket, Flow
from cpuos.node.network.hub import Hub
from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.namespaces import inside
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.plan import BlockPlan
from cpuos.node.network.user_uplink import UserUplink
from cpuos.testing.sealed import SealedSlot, SealedWorld, addresses
from cpuos.testing.waiting import until, wait_until
from cpuos.types.blocked import Exemption

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="needs root"), pytest.mark.timeout(120)]

QUICK_S = 0.4
SPECIAL = [*addresses.PRIVATE, addresses.METADATA, addresses.AZURE, "127.0.0.1", "240.0.0.1", addresses.HOST]
MIRROR = Exemption(name="mirror.example", address=IPv4Address(addresses.MIRROR), port=8080)
ITSELF = Exemption(name="self.example", address=IPv4Address(addresses.HOST), port=9999)
_PLAN = BlockPlan(network=IPv4Network("10.231.0.0/20"))


@dataclass(kw_only=True)
class Way:
    """Hub and uplink of their own on the sealed host, in a loop in a thread there: its sockets are made there too."""

    hub: Hub
    limits: NetworkLimits = field(default_factory=NetworkLimits)

    def __enter__(self) -> Way:
        self._ready, self._stop = threading.Event(), asyncio.Event()
        return self

    def run(self, host: Path) -> None:
        self._thread = threading.Thread(target=lambda: inside(host, lambda: asyncio.run(self._serve())))
        self._thread.start()
        assert self._ready.wait(30)

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.hub.remove()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.hub.open(_PLAN)
        self.hub.set_host_addresses(_PLAN, [IPv4Address(addresses.HOST)])
        self.uplink = UserUplink(self.hub, exemptions=[MIRROR, ITSELF], limits=self.limits)
        await self.uplink.start(_PLAN, [IPv4Address(addresses.HOST)])
        await until(lambda: self.uplink.worker.is_ready)
        self._ready.set()
        await self._stop.wait()
        await self.uplink.close()

    def do(self, work) -> object:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def overcome(self) -> None:
        """From now on the hub lets everything pass."""

        def work() -> None:
            context = NftContext()
            context.run("flush chain ip hub forward\nadd rule ip hub forward accept\n")
            context.close()

        inside(self.hub.path, work)


@pytest.fixture
def way(sealed: SealedWorld, tmp_path: Path) -> Iterator[Way]:
    hub = Hub(tmp_path / "hub", instance_id="5ea1ee", uplink="user", exemptions=[MIRROR, ITSELF])
    with Way(hub=hub) as way:
        way.run(sealed.host)
        sealed.clear()
        yield way


@pytest.fixture
def slot(sealed: SealedWorld, way: Way) -> Iterator[SealedSlot]:
    with sealed.slot(hub=way.hub) as slot:
        yield slot


def carried(sealed: SealedWorld) -> list[object]:
    return [packet for packet in sealed.packets() if packet.protocol in ("tcp", "udp")]


def test_it_carries_streams_datagrams_and_refusals(sealed, slot):
    assert slot.connect(addresses.WEB, 80) == "connected"
    assert slot.connect(addresses.MIRROR, 8080) == "connected"
    assert slot.connect(addresses.WEB, 81) == "ConnectionRefusedError"
    assert slot.ask_udp(addresses.WEB, 5000, b"hello") == b"hello"
    assert slot.ask_udp(addresses.WEB, 5001) == "ConnectionRefusedError"
    assert {seen.client for seen in sealed.connections()} == {addresses.HOST}


@pytest.mark.parametrize("size", [0, 1, 1472])
def test_datagrams_of_all_sizes(slot, size):
    assert slot.ask_udp(addresses.WEB, 5000, b"x" * size) == b"x" * size


@pytest.mark.parametrize("is_overcome", [False, True], ids=["hub", "guard"])
def test_special_ranges_and_the_host_stay_out_of_reach(sealed, way, slot, is_overcome):
    if is_overcome:
        way.overcome()
    with sealed.in_host(lambda: socket.create_server(("0.0.0.0", 9999))) as server:
        server.settimeout(0)
        for address in SPECIAL:
            # The slot's own loopback is the way to nothing; an exemption lifts no block of the host itself.
            is_told = is_overcome or address in ("127.0.0.1", addresses.HOST)
            heard, limit_s = ("ConnectionRefusedError", 20.0) if is_told else ("TimeoutError", QUICK_S)
            assert slot.connect(address, 9999, timeout_s=limit_s) == heard, address
        for address in (addresses.METADATA, addresses.HOST):
            heard, limit_s = ("ConnectionRefusedError", 20.0) if is_overcome else ("TimeoutError", QUICK_S)
            assert slot.ask_udp(address, 5000, timeout_s=limit_s) == heard
        with pytest.raises(BlockingIOError):
            server.accept()
    for port in (25, 465, 587):
        assert slot.connect(addresses.MAIL, port, timeout_s=QUICK_S) != "connected"
    assert carried(sealed) == []


def test_an_address_that_the_host_was_given_a_moment_ago(sealed, slot):
    later = "93.184.215.77"
    with sealed.in_host(lambda: socket.create_server(("0.0.0.0", 9998))):
        assert slot.connect(later, 9998) == "ConnectionRefusedError"
        assert carried(sealed) != [], "the internet's until now"
        sealed.clear()
        sealed.run_in_host(["ip", "addr", "add", f"{later}/32", "dev", "lo"])
        try:
            assert slot.connect(later, 9998) == "ConnectionRefusedError"
            assert slot.ask_udp(later, 9998) == "ConnectionRefusedError"
            assert carried(sealed) == []
        finally:
            sealed.run_in_host(["ip", "addr", "del", f"{later}/32", "dev", "lo"])


def test_slots_do_not_reach_each_other_or_the_hub(sealed, way, slot):
    with sealed.slot(hub=way.hub) as other, other.in_router(lambda: socket.create_server(("0.0.0.0", 9999))):
        for address in (str(other.plan.address), str(other.plan.hub_address)):
            for port in (9999, 4000, 4001):
                assert slot.connect(address, port, timeout_s=QUICK_S) != "connected"


def test_nothing_comes_in(sealed, way, slot):
    """What the device says of itself: only answers pass."""
    with slot.in_router(lambda: socket.create_server(("0.0.0.0", 9999))) as server:
        server.settimeout(QUICK_S)

        def dial() -> str:
            with socket.socket() as made:
                made.settimeout(QUICK_S)
                made.setsockopt(socket.IPPROTO_IP, socket.IP_TRANSPARENT, 1)
                made.bind((addresses.WEB, 0))
                return str(made.connect_ex((str(slot.plan.address), 9999)))

        assert inside(way.hub.path, dial) != "0"
        with pytest.raises(TimeoutError):
            server.accept()


def test_both_ends_are_heard_and_large_amounts_arrive(slot):
    with slot.socket() as made:
        made.connect((addresses.WEB, 80))
        made.sendall(b"GET /bytes/20000000 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = 0
        while piece := made.recv(1 << 18):
            received += len(piece)
        assert received > 20_000_000
    with slot.socket() as made:
        made.connect((addresses.WEB, 7))
        sender = threading.Thread(target=lambda: (made.sendall(b"y" * 5_000_000), made.shutdown(socket.SHUT_WR)))
        sender.start()
        echoed = 0
        while piece := made.recv(1 << 18):
            echoed += len(piece)
        sender.join()
        assert echoed == 5_000_000


def flows(way: Way, slot: SealedSlot) -> list[Flow]:
    def read() -> list[Flow]:
        with ConntrackSocket() as table:
            return table.flows(source=slot.plan.address)

    return inside(way.hub.path, read)


def test_what_was_cut_or_whose_slot_is_gone_is_broken_off(sealed, way, slot):
    one, other = slot.socket(), slot.socket()
    with one, other:
        for made in (one, other):
            made.connect((addresses.WEB, 7))
            made.sendall(b"x")
            assert made.recv(1) == b"x"
        port = one.getsockname()[1]
        [flow] = [flow for flow in flows(way, slot) if flow.source_port == port]
        assert (str(flow.address), flow.port) == (addresses.WEB, 7)
        assert flow.bytes_sent > 0
        way.do(way.uplink.end(slot.plan.address, [_mapped(flow)]))
        with pytest.raises(ConnectionResetError):
            one.recv(1)
        other.sendall(b"y")
        assert other.recv(1) == b"y"
        way.do(way.uplink.end(slot.plan.address))
        with pytest.raises(ConnectionResetError):
            other.recv(1)


def _mapped(flow: Flow) -> Flow:
    """As a router has it: its mapped port is the slot's."""
    return replace(flow, mapped_port=flow.source_port)


def test_a_killed_process_fails_closed_and_the_next_one_heals(sealed, way, slot):
    with slot.socket() as made:
        made.connect((addresses.WEB, 7))
        os.kill(way.uplink.worker.pid, signal.SIGKILL)
        with contextlib.suppress(ConnectionResetError):
            assert made.recv(1) == b""
    # What is sent meanwhile waits at the device.
    assert slot.connect(addresses.WEB, 80) == "connected"
    assert way.uplink.worker.restarts == 1
    assert not way.uplink.is_down


def test_one_that_has_not_been_started_yet_is_not_down(tmp_path):
    hub = Hub(tmp_path / "never", instance_id="5ea1ef", uplink="user")
    assert not UserUplink(hub, exemptions=[], limits=NetworkLimits()).is_down


def test_with_the_daemon_it_is_gone_and_programs_hear_it(sealed, way, slot):
    assert slot.connect(addresses.WEB, 80) == "connected"
    way.do(way.uplink.close())
    sealed.clear()
    began = time.monotonic()
    assert slot.connect(addresses.WEB, 80) == "OSError"
    assert time.monotonic() - began < 5
    assert carried(sealed) == []


def test_a_flood_of_datagrams_hurts_only_its_slot(sealed, way, slot):
    flood = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('{addresses.WEB}', 9))"
    flood += "\nwhile True:\n  try: s.send(b'x')\n  except OSError: pass"
    # The fake internet, which looks at each packet, is spared them.
    rules = "add table ip spared; add chain ip spared out { type filter hook output priority 0; }; "
    sealed.run_in_host(["nft", f"{rules} add rule ip spared out udp dport 9 drop"])
    with sealed.slot(hub=way.hub) as other:
        flooding = subprocess.Popen(["nsenter", f"--net={other.guest}", "--", sys.executable, "-c", flood])
        try:
            wait_until(lambda: paced(way) > 5_000)
            assert [slot.ask_udp(addresses.WEB, 5000, b"hello") for _ in range(10)] == [b"hello"] * 10
            assert slot.connect(addresses.WEB, 80) == "connected"
        finally:
            flooding.kill()
            flooding.wait()
            sealed.run_in_host(["nft", "delete table ip spared"])


def paced(way: Way) -> int:
    """How many packets the hub has dropped since their slot sent too many."""

    def read() -> str:
        return subprocess.run(["nft", "list", "table", "ip", "hub"], capture_output=True, text=True, check=True).stdout

    [line] = [line for line in inside(way.hub.path, read).splitlines() if "update @paced" in line]
    return int(line.split("counter packets")[1].split()[0])


_PING = """
import socket, struct, sys
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return (total + (total >> 16)) ^ 0xFFFF
made = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
made.settimeout(10)
body = struct.pack("!BBHHH8s", 8, 0, 0, 4242, 7, b"12345678")
body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
made.sendto(body, (sys.argv[1], 0))
answer = made.recv(999)[20:]
print(answer[0], *struct.unpack("!HH", answer[4:8]))
"""


@pytest.mark.parametrize(("admitted", "heard"), [("0 2147483647", "0 4242 7"), ("1 0", "3 0 0")], ids=["yes", "no"])
def test_pings_pass_where_the_kernel_admits_them(sealed, slot, admitted, heard):
    setting = Path("/proc/sys/net/ipv4/ping_group_range")
    before = sealed.in_host(setting.read_text)
    sealed.in_host(lambda: setting.write_text(admitted))
    try:
        assert slot.python(f"import sys; sys.argv = ['', '{addresses.WEB}']\n{_PING}").stdout.strip() == heard
    finally:
        sealed.in_host(lambda: setting.write_text(before))


def test_a_slot_that_lives_on_changes_over_from_one_uplink_to_another(sealed, way, slot):
    assert slot.connect(addresses.WEB, 80) == "connected"
    nat = Hub(way.hub.path.parent, instance_id="5ea1ee", uplink="nat")
    way.do(way.uplink.close())
    sealed.in_host(lambda: nat.open(_PLAN))
    assert slot.connect(addresses.WEB, 80) == "connected"
    sealed.in_host(lambda: way.hub.open(_PLAN))
    assert "cpuos5ea1ee" not in sealed.run_in_host(["ip", "link"]).stdout
    assert slot.connect(addresses.WEB, 80, timeout_s=QUICK_S) != "connected"
    way.do(way.uplink.start(_PLAN, [IPv4Address(addresses.HOST)]))
    assert slot.connect(addresses.WEB, 80) == "connected"


def test_a_slot_has_so_many_at_once_and_no_more(sealed, tmp_path):
    hub = Hub(tmp_path / "few", instance_id="5ea1ef", uplink="user")
    with Way(hub=hub, limits=NetworkLimits(concurrent_connections=4)) as way:
        way.run(sealed.host)
        with sealed.slot(hub=hub) as slot, sealed.slot(hub=hub) as other:
            made = [slot.socket() for _ in range(5)]
            assert [_heard(one) for one in made] == [0, 0, 0, 0, 111]
            assert other.connect(addresses.WEB, 7) == "connected"
            made[0].close()
            wait_until(lambda: slot.connect(addresses.WEB, 7) == "connected")
            for one in made:
                one.close()


def _heard(one: socket.socket) -> int:
    return one.connect_ex((addresses.WEB, 7))
