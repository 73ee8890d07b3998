"""The records worker as a process without rights, fed by real kernels: what is logged, lost, counted and asked for."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from peek_rig import policy_of

import packets
from cpuos.node.network.conntrack import ConntrackSocket
from cpuos.node.network.log_sockets import open_end_socket, open_log_socket
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.workers.calls import Operation
from cpuos.node.network.workers.channel import Descriptors
from cpuos.node.network.workers.lockdown import confinement_of
from cpuos.node.network.workers.messages import Close, Hub, Open, RouterCounts, Start, WantCounts
from cpuos.node.network.workers.supervisor import StartCall, Timing, Worker
from cpuos.testing.waiting import until
from router_world import RouterWorld, router_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SANDBOX = "s" * 20
WEB = "93.184.215.14"
PORT = 8080


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with router_world(tmp_path_factory.mktemp("world")) as made:
        made.in_outside(_count_connections)
        yield made


def _count_connections() -> None:
    Path("/proc/sys/net/netfilter/nf_conntrack_acct").write_text("1")
    _load("table ip counted {\n chain input {\n type filter hook input priority 10; ct state new accept\n }\n}\n")


def _load(rules: str) -> None:
    context = NftContext()
    try:
        context.run(rules)
    finally:
        context.close()


class Node:
    """What the node does for the records worker."""

    def __init__(self, world: RouterWorld) -> None:
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix="cpuos-records-"))
        self.folder.chmod(0o755)
        self.state = self.folder / "state"
        self.state.mkdir(mode=0o700)
        user = confinement_of(memory_mib=1, descriptors=1)
        os.chown(self.state, user.uid, user.gid)
        self.path = str(self.folder / "network.sock")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        os.chmod(self.path, 0o666)
        self.listener.listen()
        self.feeds = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        self.log_buffer: int | None = None
        self.asked = 0
        """How often the worker wanted counters."""
        self.worker = Worker(
            "records",
            start=lambda: StartCall(
                message=Start(state_dir=str(self.state)),
                descriptors=[*(theirs.fileno() for _, theirs in self.feeds), self.listener.fileno()],
            ),
            on_restart=self.open,
            questions=[Operation(WantCounts, self.give_counts)],
            timing=Timing(first_backoff_s=0.01),
        )

    async def open(self, worker: Worker, *layers: Any) -> None:
        with open_end_socket(self.world.outside_path) as ends:
            await worker.request(Hub(), descriptors=[ends.fileno()])
        self.world.apply(*(layers or ["internet"]))
        policy = policy_of(*(layers or ["internet"]))
        await worker.request(Close(sandbox=SANDBOX))  # a router has one log socket at a time
        opened = Open(sandbox=SANDBOX, policy=policy, slot_address=self.world.address)
        with open_log_socket(self.world.router_path) as log:
            if self.log_buffer is not None:
                log.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.log_buffer)
            await worker.request(opened, descriptors=[log.fileno()])

    async def give_counts(self, message: WantCounts, descriptors: Descriptors) -> None:
        assert message.sandbox == SANDBOX
        self.asked += 1
        await self.count()

    async def count(self, *, since: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Tell it the router's counters; what they are beyond `since`."""
        counters = await asyncio.to_thread(self.world.router.counters)
        allowed, refused = counters.allowed, counters.refused + counters.limited
        await self.worker.request(RouterCounts(sandbox=SANDBOX, allowed=allowed, refused=refused))
        return allowed - since[0], refused - since[1]

    async def begin(self) -> tuple[int, int]:
        """The world is shared: only what comes from now on counts."""
        counters = await asyncio.to_thread(self.world.router.counters)
        allowed, refused = counters.allowed, counters.refused + counters.limited
        counts = RouterCounts(sandbox=SANDBOX, allowed=allowed, refused=refused, is_beginning=True)
        await self.worker.request(counts)
        return allowed, refused

    async def get(self, target: str, *, uid: int | None = None) -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(_get, self.path, target)

    async def entries(self, after: int = 0) -> list[dict[str, Any]]:
        _, page = await self.get(f"/v1/connections?after={after}&limit=5000")
        found = page["entries"]
        while page["entries"]:
            _, page = await self.get(f"/v1/connections?after={page['next']}&limit=5000")
            found += page["entries"]
        return found

    async def refused(self) -> list[dict[str, Any]]:
        """What was refused of a policy, or is known of it by counters."""
        return [entry for entry in await self.entries() if entry["event"] in ("refused", "gap")]

    async def until_refused(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 20
        while sum(entry["count"] for entry in await self.refused()) < count:
            assert time.monotonic() < deadline, await self.refused()
            await asyncio.sleep(0.05)
        return await self.refused()

    async def until_counted(self, count: int, *events: str) -> list[dict[str, Any]]:
        """Entries of these events, once they are so many together; more are a fault."""

        async def look() -> list[dict[str, Any]]:
            found = [entry for entry in await self.entries() if entry["event"] in events]
            counted = sum(entry["count"] for entry in found)
            assert counted <= count, found
            return found if counted == count else []

        return await until(look)

    async def until(self, event: str) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while True:
                found = [entry for entry in await self.entries() if entry["event"] == event]
                if found:
                    return found[-1]
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self.listener.close()
        for pair in self.feeds:
            for end in pair:
                end.close()
        shutil.rmtree(self.folder)


def _get(path: str, target: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("records")
    connection.sock = socket.socket(socket.AF_UNIX)
    with contextlib.closing(connection):
        connection.sock.settimeout(30)
        connection.sock.connect(path)
        connection.request("GET", target)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.fixture
async def node(world):
    made = Node(world)
    try:
        async with made.worker:
            await made.open(made.worker)
            await made.begin()
            yield made
    finally:
        made.close()
        world.fresh()


async def test_a_connection_from_its_first_packet_to_its_bytes(world, node):
    with world.server(PORT), await asyncio.to_thread(world.guest_socket) as guest:
        await asyncio.to_thread(guest.connect, (WEB, PORT))
        guest.sendall(b"hello")
        assert guest.recv(10) == b"hello"
        opened = await node.until("open")
        assert (opened["address"], opened["port"], opened["kind"]) == (WEB, PORT, "tcp")
        assert opened["rule"] == "internet"
        assert world.in_outside(_forget_all) >= 1
        closed = await node.until("closed")
    assert closed["connection"] == opened["connection"]
    assert closed["bytes_sent"] > 200
    assert closed["bytes_received"] > 150


async def test_refusals_are_there_as_soon_as_they_are_asked_for(world, node):
    await node.open(node.worker, "off")
    feed = node.feeds[0][0]
    for number in range(1, 20):
        assert await asyncio.to_thread(world.connect, WEB, number) == "Connection refused"
        feed.send(json.dumps({"sandbox": SANDBOX, "kind": "dns", "name": f"n{number}.test", "rule": "off"}).encode())
        _, answer = await node.get(f"/v1/sandboxes/{SANDBOX}/refusals?after=0")
        found = [(entry["kind"], entry["port"], entry["name"]) for entry in answer["refusals"]]
        assert ("tcp", number, None) in found
        assert ("dns", None, f"n{number}.test") in found
    assert answer["complete"] is True
    assert {entry["rule"] for entry in answer["refusals"]} == {"sandbox network off", "off"}
    _, later = await node.get(f"/v1/sandboxes/{SANDBOX}/refusals?after={answer['next']}")
    assert later["refusals"] == []
    assert later["instance"] == answer["instance"]


async def test_wrong_questions(node):
    status, answer = await node.get("/v1/connections?after=x")
    assert (status, answer["error"]["code"]) == (422 if status == 422 else 400, "invalid_request")
    status, answer = await node.get(f"/v1/sandboxes/{'x' * 20}/refusals?after=0")
    assert (status, answer["refusals"], answer["complete"]) == (200, [], False)


async def test_other_users_are_refused(node):
    command = ["curl", "-s", "--unix-socket", node.path, "http://records/v1/connections"]
    asked = await asyncio.to_thread(subprocess.run, command, user=12345, group=12345, capture_output=True, cwd="/")
    # It may be cut off before it has read why.
    assert not asked.stdout or json.loads(asked.stdout)["error"]["code"] == "forbidden"
    assert (await node.get("/v1/connections"))[0] == 200


async def test_a_flood_of_refusals_is_counted_whole(world, node):
    await node.open(node.worker, "off")
    before = await node.begin()
    await asyncio.to_thread(world.send, *(packets.udp_frame(WEB, 1000 + n % 50) for n in range(3000)))
    await asyncio.to_thread(world.settle)
    entries = await node.until_refused(3000)
    gaps = [entry for entry in entries if entry["event"] == "gap"]
    assert {(gap["verdict"], gap["kind"]) for gap in gaps} == {("refused", "gap")}
    assert 2000 < sum(gap["count"] for gap in gaps) < 3000
    assert len(entries) < 200
    _, refused = await node.count(since=before)
    assert refused == 3000
    assert sum(entry["count"] for entry in await node.refused()) == 3000, "nothing is told twice"


async def test_a_flood_is_told_while_it_goes_on_and_a_quiet_sandbox_is_not_counted(world, node):
    await node.open(node.worker, "off")
    before = await node.begin()
    for told in range(1, 4):
        await asyncio.to_thread(world.send, *(packets.udp_frame(WEB, 1000 + n) for n in range(500)))
        await asyncio.to_thread(world.settle)
        assert sum(entry["count"] for entry in await node.until_refused(500 * told)) == 500 * told
    _, refused = await node.count(since=before)
    assert refused == 1500
    asked = node.asked
    await asyncio.to_thread(world.send, packets.udp_frame(WEB, 9))
    await node.until_refused(1501)
    assert node.asked - asked <= 2, "the spell after the last flood, and no more"


async def test_what_a_full_buffer_loses_is_a_gap(world, node):
    node.log_buffer = 4096
    await node.open(node.worker)
    before = await node.begin()
    assert node.worker.pid is not None
    os.kill(node.worker.pid, signal.SIGSTOP)
    await asyncio.to_thread(world.send, *(packets.udp_frame(WEB, 1000 + n) for n in range(500)))
    await asyncio.to_thread(world.settle)
    os.kill(node.worker.pid, signal.SIGCONT)
    await node.entries()
    await asyncio.to_thread(world.send, packets.udp_frame(WEB, 9))
    gap = await node.until("gap")
    assert gap["count"] > 300
    await node.count(since=before)
    await node.until_counted(501, "open", "gap")


async def test_an_outage_is_a_gap_and_nothing_before_it_is_lost(world, node):
    before = await node.begin()
    await asyncio.to_thread(world.send, packets.udp_frame(WEB, 1000))
    await asyncio.to_thread(world.settle)
    first = await node.until("open")
    assert node.worker.pid is not None
    os.kill(node.worker.pid, signal.SIGSTOP)  # what comes now is lost with the process
    await asyncio.to_thread(world.send, *(packets.udp_frame(WEB, 1001 + n) for n in range(7)))
    await asyncio.to_thread(world.settle)
    os.kill(node.worker.pid, signal.SIGKILL)
    await until(lambda: node.worker.restarts)
    async with asyncio.timeout(60):
        await node.worker.wait_ready()
    await node.count(since=before)
    entries = await node.entries()
    assert entries[0] == first
    gaps = [(entry["verdict"], entry["count"]) for entry in entries if entry["event"] == "gap"]
    # The counters that were told first are not remembered over a restart: they began at none.
    assert gaps[-1][0] == "allowed"
    assert gaps[-1][1] >= 7
    _, page = await node.get("/v1/connections?after=0&limit=1")
    assert (page["next"], len(page["entries"])) == (1, 1)


async def test_ten_thousand_connections_a_second_stay_bounded(world, node):
    before = await node.begin()
    assert node.worker.pid is not None
    started, cpu = time.monotonic(), _cpu_s(node.worker.pid)
    sent = 0
    for step in range(10):
        frames = [packets.udp_frame(WEB, 1 + n, source_port=1024 + step) for n in range(1200)]
        await asyncio.to_thread(world.send, *frames)
        sent += len(frames)
    await asyncio.to_thread(world.settle)
    allowed, _ = await node.count(since=before)
    used = _cpu_s(node.worker.pid) - cpu
    entries = await node.entries()
    took, rss = time.monotonic() - started, _rss_mib(node.worker.pid)
    print(f"{sent} in {took:.1f} s, {used / sent * 1e6:.0f} us each, {rss} MiB")
    assert allowed == sent
    assert sum(entry["count"] for entry in entries if entry["event"] in ("open", "gap")) == sent
    assert rss < 160
    assert used / sent < 300e-6


async def test_a_worker_that_is_told_to_end_writes_down_what_it_holds(world, node):
    await node.open(node.worker, "off")
    assert await asyncio.to_thread(world.connect, WEB, 81) == "Connection refused"
    await node.worker.close()
    [path] = (node.state).glob("*.jsonl")
    assert [json.loads(line)["port"] for line in path.read_text().splitlines()] == [81]


async def test_closing_lets_go_of_the_router(world, node):
    await node.worker.request(Close(sandbox=SANDBOX))
    await node.worker.request(Close(sandbox=SANDBOX))
    assert node.worker.pid is not None
    before = len(os.listdir(f"/proc/{node.worker.pid}/fd"))
    await node.open(node.worker)
    assert len(os.listdir(f"/proc/{node.worker.pid}/fd")) == before + 1


def _forget_all() -> int:
    with ConntrackSocket() as table:
        flows = [flow for flow in table.flows() if flow.address == IPv4Address(WEB)]
        return sum(table.delete(flow) for flow in flows)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10
