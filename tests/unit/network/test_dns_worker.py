"""The DNS worker as a process: its two sockets, what it asks the node, and sandboxes beside each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import dns.asyncquery
import dns.flags
import dns.message
import dns.rcode
import pytest
from resolver_rig import OTHER, SANDBOX, FakeResolver, Rig, addresses, exemption, policy, words

from cpuos.errors import PlatformError, Unavailable
from cpuos.node.network.forwarder.listeners import DatagramListener
from cpuos.node.network.forwarder.sandbox import Limits
from cpuos.node.network.workers.calls import Operation
from cpuos.node.network.workers.channel import MAX_MESSAGE_BYTES
from cpuos.node.network.workers.messages import Close, Host, Learn, Learned, LearnedName, Open, PolicyChange, Start
from cpuos.node.network.workers.supervisor import StartCall, Timing, Worker
from cpuos.testing.waiting import until

WEB = "93.184.215.14"
ALLOW = {"allow": ["*.example"]}


class Guest:
    """The two sockets of one sandbox, on loopback; the worker has copies."""

    def __init__(self) -> None:
        self.udp, self.tcp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket()
        for end in (self.udp, self.tcp):
            end.bind(("127.0.0.1", 0))
        self.tcp.listen()

    @property
    def descriptors(self) -> list[int]:
        return [self.udp.fileno(), self.tcp.fileno()]

    def close(self) -> None:
        self.udp.close()
        self.tcp.close()

    async def ask(self, name: str, rdtype: str = "A", *, stream: bool = False, timeout_s: float = 30):
        query = dns.message.make_query(name, rdtype, use_edns=0)
        ask = dns.asyncquery.tcp if stream else dns.asyncquery.udp
        port = (self.tcp if stream else self.udp).getsockname()[1]
        return await ask(query, "127.0.0.1", port=port, timeout=timeout_s)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.tcp.getsockname(), timeout=30)


class Node:
    """The worker's node: keeps what it is asked to open."""

    def __init__(self, resolver: FakeResolver) -> None:
        self.resolver = resolver
        self.learned: list[Learn] = []
        self.refuse = False
        self.records, self._feed = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.records.setblocking(False)
        self.replay: Callable | None = None
        self.worker = Worker(
            "dns",
            start=self._start,
            questions=[Operation(Learn, self._learn)],
            on_restart=self._replay,
            timing=Timing(first_backoff_s=0.01),
        )

    def _start(self) -> StartCall:
        message = Start(resolvers=["127.0.0.1"], resolver_port=self.resolver.port)
        return StartCall(message=message, descriptors=[self._feed.fileno()])

    async def _learn(self, message: Learn, descriptors) -> None:
        if self.refuse:
            raise ValueError("no slot")
        self.learned.append(message)

    async def _replay(self, worker: Worker) -> None:
        if self.replay is not None:
            await self.replay()

    async def open(self, guest: Guest, network="internet", *, sandbox: str = SANDBOX, **rest) -> None:
        message = Open(sandbox=sandbox, policy=policy(network), **rest)
        await self.worker.request(message, descriptors=guest.descriptors)

    def read_records(self) -> list[dict]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(json.loads(self.records.recv(65536)))
        return found

    def close(self) -> None:
        self.records.close()
        self._feed.close()


@pytest.fixture
async def resolver():
    async with FakeResolver() as made:
        made.zone = {
            ("www.example", "A"): [f"www.example. 300 IN A {WEB}"],
            ("big.example", "TXT"): [f'big.example. 60 IN TXT "{"x" * 200}{n}"' for n in range(20)],
        }
        yield made


@pytest.fixture
async def node(resolver):
    made = Node(resolver)
    async with made.worker:
        yield made
    made.close()


@pytest.fixture
def guest():
    made = Guest()
    yield made
    made.close()


@pytest.fixture
def other():
    made = Guest()
    yield made
    made.close()


async def test_udp_and_tcp(node, guest) -> None:
    await node.open(guest)
    for stream in (False, True):
        assert addresses(await guest.ask("www.example", stream=stream)) == [WEB]
    assert (await guest.ask("big.example", "TXT")).flags & dns.flags.TC
    assert len((await guest.ask("big.example", "TXT", stream=True)).answer[0]) == 20
    assert [(r["event"], r["address"]) for r in node.read_records()] == [("resolved", WEB)]


async def test_the_node_opens_before_the_guest_hears(node, guest) -> None:
    await node.open(guest, ALLOW)
    assert addresses(await guest.ask("www.example")) == [WEB]
    assert [(row.sandbox, row.name) for row in node.learned] == [(SANDBOX, "www.example")]
    assert [(str(row.address), row.ttl_s) for row in node.learned[0].addresses] == [(WEB, 330)]
    answer = await node.worker.request(PolicyChange(sandbox=SANDBOX, policy=policy(ALLOW, version=2)), answer=Learned)
    assert [(row.name, str(row.address)) for row in answer.learned] == [("www.example", WEB)]
    assert 300 < answer.learned[0].ttl_s <= 330


async def test_what_the_node_does_not_open_is_not_told(node, guest) -> None:
    await node.open(guest, ALLOW)
    node.refuse = True
    assert (await guest.ask("www.example")).rcode() == dns.rcode.SERVFAIL
    node.refuse = False
    assert addresses(await guest.ask("www.example")) == [WEB]


async def test_sandboxes_have_their_own_policies(node, guest, other) -> None:
    await node.open(guest, "off")
    await node.open(other, ALLOW, sandbox=OTHER, exemptions=[exemption("mirror.example", "10.1.2.3")])
    refused = await guest.ask("www.example")
    assert words(refused) == (17, "cpuos network policy: sandbox network off")
    assert addresses(await other.ask("www.example")) == [WEB]
    assert addresses(await other.ask("mirror.example")) == ["10.1.2.3"]
    assert (await guest.ask("mirror.example")).rcode() == dns.rcode.REFUSED
    await node.worker.request(PolicyChange(sandbox=SANDBOX, policy=policy("internet", version=2)), answer=Learned)
    assert addresses(await guest.ask("www.example")) == [WEB]
    assert (
        await guest.ask("mirror.example")
    ).rcode() == dns.rcode.NXDOMAIN  # asked outside: the exception is the other's


async def test_the_hosts_new_address_is_blocked_at_once(node, guest) -> None:
    await node.open(guest)
    assert addresses(await guest.ask("www.example")) == [WEB]
    await node.worker.request(Host(host_addresses=[WEB]))
    assert words(await guest.ask("www.example"))[1] == "cpuos network policy: always blocked: the host's own address"


async def test_closing_and_opening_again(node, guest, other) -> None:
    await node.open(guest)
    await guest.ask("www.example")
    waiting = guest.connect()
    await node.open(other)  # the same sandbox, new sockets
    assert addresses(await other.ask("www.example")) == [WEB]
    assert waiting.recv(1) == b""
    waiting.close()
    with pytest.raises(dns.exception.Timeout):
        await guest.ask("www.example", timeout_s=0.2)
    for _ in range(2):
        await node.worker.request(Close(sandbox=SANDBOX))
    with pytest.raises(dns.exception.Timeout):
        await other.ask("www.example", timeout_s=0.2)


async def test_descriptors_go_with_their_sandbox(node, guest, resolver) -> None:
    def held() -> int:
        return len(os.listdir(f"/proc/{node.worker.pid}/fd"))

    before = held()
    for number in range(20):
        await node.open(guest, sandbox=f"{number:020}")
    assert held() == before + 40
    resolver.script = lambda query, via: None
    asked = [asyncio.create_task(guest.ask(f"x{n}.example", timeout_s=0.3)) for n in range(20)]
    await asyncio.sleep(0.1)
    for number in range(20):
        await node.worker.request(Close(sandbox=f"{number:020}"))
    await asyncio.gather(*asked, return_exceptions=True)
    assert held() == before


async def test_wrong_descriptors_are_refused(node, guest) -> None:
    read, write = os.pipe()
    before = len(os.listdir(f"/proc/{node.worker.pid}/fd"))
    message = Open(sandbox=SANDBOX, policy=policy("internet"))
    for wrong in ([], guest.descriptors[:1], guest.descriptors[::-1], [read, write]):
        with pytest.raises(PlatformError):
            await node.worker.request(message, descriptors=wrong)
    assert len(os.listdir(f"/proc/{node.worker.pid}/fd")) == before
    await node.open(guest)
    assert node.worker.restarts == 0
    os.close(read)
    os.close(write)


async def test_it_heals_when_it_is_killed(node, guest) -> None:
    async def replay() -> None:
        await node.open(guest, ALLOW)

    await replay()
    node.replay = replay
    await guest.ask("www.example")
    os.kill(node.worker.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await until(lambda: node.worker.restarts)
        await node.worker.wait_ready()
    assert addresses(await guest.ask("www.example")) == [WEB]
    assert len(node.learned) == 2
    # The feed goes on with the next process.
    assert [r["address"] for r in node.read_records()] == [WEB, WEB]


async def test_before_its_start_it_opens_nothing(resolver, guest) -> None:
    made = Node(resolver)
    with pytest.raises(Unavailable):
        await made.open(guest)
    made.close()


# hostile guests


def exchange(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(struct.pack(">H", len(data)) + data)
    head = connection.recv(2, socket.MSG_WAITALL)
    return connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)


async def test_streams_of_all_kinds(node, guest) -> None:
    await node.open(guest)
    question = dns.message.make_query("www.example", "A").to_wire()

    def talk() -> None:
        with guest.connect() as connection:  # several questions, one after the other and at once
            for _ in range(3):
                assert addresses(dns.message.from_wire(exchange(connection, question))) == [WEB]
            connection.sendall((struct.pack(">H", len(question)) + question) * 3)
            for _ in range(3):
                length = int.from_bytes(connection.recv(2, socket.MSG_WAITALL), "big")
                assert addresses(dns.message.from_wire(connection.recv(length, socket.MSG_WAITALL))) == [WEB]
        with guest.connect() as connection:  # a byte at a time
            for byte in struct.pack(">H", len(question)) + question:
                connection.sendall(bytes([byte]))
            assert connection.recv(2, socket.MSG_WAITALL)
        for wrong in (b"\xff\xff" + b"x" * 100, b"\0\0", b"\0\5hello", b"\0\x0c" + b"\xff" * 12):
            with guest.connect() as connection:
                with contextlib.suppress(OSError):  # it may be closed before all is sent
                    connection.sendall(wrong)
                    connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""

    await asyncio.to_thread(talk)


async def test_idle_streams_hold_up_nobody(node, guest, other) -> None:
    await node.open(guest)
    await node.open(other, sandbox=OTHER)
    idle = [guest.connect() for _ in range(40)]
    assert addresses(await other.ask("www.example", stream=True)) == [WEB]
    assert addresses(await guest.ask("www.example")) == [WEB]

    def ended() -> int:
        count = 0
        for connection in idle:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                count += connection.recv(1) == b""
        return count

    await until(lambda: ended() == 40 - 16)
    for connection in idle:
        connection.close()

    async def there_is_room() -> bool:
        with contextlib.suppress(OSError, EOFError):
            return addresses(await guest.ask("www.example", stream=True)) == [WEB]
        return False

    await until(there_is_room)


async def test_garbage_and_floods_leave_it_alive(node, guest, other) -> None:
    await node.open(guest)
    await node.open(other, sandbox=OTHER)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for number in range(3000):
        sender.sendto(os.urandom(number % 600), guest.udp.getsockname())
    assert addresses(await other.ask("www.example")) == [WEB]
    assert node.worker.restarts == 0
    sender.close()


async def test_a_flooded_sandbox_is_served_at_its_rate(node, guest) -> None:
    """What it sends too much waits in its own socket, and is dropped there."""
    await node.open(guest)
    question = dns.message.make_query("www.example", "A").to_wire()
    await guest.ask("www.example")
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sender.connect(guest.udp.getsockname())

    def flood() -> int:
        for _ in range(3000):
            sender.send(question)
        sender.settimeout(2)
        answered = 0
        with contextlib.suppress(TimeoutError):
            while sender.recv(600):
                answered += 1
        return answered

    answered = await asyncio.to_thread(flood)
    assert 50 < answered < 1000
    sender.close()


async def test_memory_has_an_end(node, resolver) -> None:
    """Every answer of a hostile zone is new, large and long-lived: the cache of a sandbox stays within its limit."""

    def resident_kib() -> int:
        status = Path(f"/proc/{node.worker.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def script(query, via):
        answer = dns.message.make_response(query)
        name = query.question[0].name
        answer.answer.append(dns.rrset.from_text(name, 3600, "IN", "TXT", *(f'"{"x" * 250}"' for _ in range(4))))
        return answer.to_wire()

    resolver.script = script
    guests = [Guest() for _ in range(4)]
    for number, one in enumerate(guests):
        await node.open(one, sandbox=f"{number:020}")

    async def ask(rounds: range) -> None:
        for n in rounds:
            await asyncio.gather(*(one.ask(f"x{n}.example", "TXT") for one in guests))

    await ask(range(50))
    before = resident_kib()
    await ask(range(50, 200))
    assert resident_kib() - before < 4 * 600
    for one in guests:
        one.close()


async def test_a_neighbour_has_its_turn(resolver, guest, other) -> None:
    """However many questions wait in one socket, another's is answered after a few of them."""
    rig = Rig(resolver)
    served = [
        DatagramListener(one.udp.dup(), rig.add("off", sandbox=name))
        for one, name in ((guest, SANDBOX), (other, OTHER))
    ]
    order: list[str] = []
    for name, forwarder in rig.forwarders.items():
        forwarder.answer_now = lambda query, name=name: order.append(name) or b"answer"
    question = dns.message.make_query("www.example", "A").to_wire()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(60):
            sender.sendto(question, guest.udp.getsockname())
        sender.sendto(question, other.udp.getsockname())
        async with asyncio.timeout(30):
            while len(order) < 61:  # noqa: ASYNC110 - turns of the loop are what is counted
                await asyncio.sleep(0)
    assert order.index(OTHER) <= 16
    for listener in served:
        await listener.close()
    rig.close()


async def test_all_that_was_learned_fits_into_one_message() -> None:
    """The longest names, as many as are kept: the answer to a change of policy must not be too large to send."""
    name = ".".join(["x" * 63] * 3 + ["y" * 61])
    rows = [LearnedName(name=name, address=f"93.184.{n // 250}.{n % 250}", ttl_s=3660) for n in range(Limits().learned)]
    message = {"ack": 1, **Learned(learned=rows).model_dump(mode="json")}
    assert len(json.dumps(message, separators=(",", ":"))) < MAX_MESSAGE_BYTES
