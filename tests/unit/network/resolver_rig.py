"""A fake public resolver on loopback, and a forwarder of one sandbox before it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import Callable, Sequence
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from cpuos.node.network.forwarder.feed import Feed
from cpuos.node.network.forwarder.query import Query
from cpuos.node.network.forwarder.sandbox import Limits, SandboxForwarder, World
from cpuos.node.network.forwarder.upstream import Resolver, Upstream
from cpuos.types.blocked import Exemption
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer

SANDBOX, OTHER = "a" * 20, "b" * 20
SOA = "example. 90 IN SOA ns.example. admin.example. 1 3600 600 86400 40"


def policy(network, *, version: int = 1, workspace=None) -> EffectivePolicy:
    layers = [("workspace", workspace), ("sandbox", network)]
    return EffectivePolicy(
        version=version,
        layers=[
            PolicyLayer(origin=origin, policy=NetworkPolicy.model_validate(given))
            for origin, given in layers
            if given is not None
        ],
    )


def rrset(line: str) -> dns.rrset.RRset:
    owner, ttl, rdclass, rdtype, *data = line.split()
    return dns.rrset.from_text(owner, int(ttl), rdclass, rdtype, " ".join(data))


class FakeResolver:
    """Answers from `zone` ((name, type) → lines of records, or None for no such name), or as `script` says."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], list[str] | None] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.raw: list[bytes] = []
        self.ports: list[int] = []
        self.script: Callable[[dns.message.Message, str], bytes | list[bytes] | None] | None = None
        self.address, self.port = "127.0.0.1", 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for _ in range(20):  # a port that is free for both
            self._udp, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), local_addr=("127.0.0.1", 0))
            self.port = self._udp.get_extra_info("sockname")[1]
            try:
                self._tcp = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
                return self
            except OSError:
                self._udp.close()
        raise OSError("no free port")

    async def __aexit__(self, *_) -> None:
        self._udp.close()
        self._tcp.close()
        await self._tcp.wait_closed()
        await asyncio.sleep(0)

    @property
    def resolver(self) -> Resolver:
        return Resolver(self.address, self.port)

    def answer(self, data: bytes, via: str) -> list[bytes]:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, rdtype = question.name.to_text(omit_final_dot=True).lower(), dns.rdatatype.to_text(question.rdtype)
        self.raw.append(data)
        self.asked.append((name, rdtype, via))
        if self.script is not None:
            answers = self.script(query, via)
            return [] if answers is None else answers if isinstance(answers, list) else [answers]
        answer = self.from_zone(query).to_wire(max_size=65535)
        if via == "udp" and len(answer) > query.payload:
            return [answer[:2] + bytes([answer[2] | 2]) + answer[3:4] + b"\0\1\0\0\0\0\0\0" + data[12:-11]]
        return [answer]

    def from_zone(self, query: dns.message.Message) -> dns.message.Message:
        question = query.question[0]
        name, rdtype = question.name.to_text(omit_final_dot=True).lower(), dns.rdatatype.to_text(question.rdtype)
        answer = dns.message.make_response(query, recursion_available=True)
        lines = self.zone.get((name, rdtype), None)
        if lines is None and not any(key[0] == name for key in self.zone):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        for line in lines or []:
            added = rrset(line)
            old = answer.get_rrset(answer.answer, added.name, added.rdclass, added.rdtype)
            if old is None:
                answer.answer.append(added)
            else:
                old.update(added)
        if not lines:
            answer.authority.append(rrset(SOA))
        return answer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                data = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
                for answer in self.answer(data, "tcp"):
                    writer.write(len(answer).to_bytes(2, "big") + answer)
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, resolver: FakeResolver) -> None:
        self._resolver = resolver

    def connection_made(self, transport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, sender) -> None:
        self._resolver.ports.append(sender[1])
        for answer in self._resolver.answer(data, "udp"):
            self._transport.sendto(answer, sender)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """`ask` goes the way of a datagram, through bytes."""

    def __init__(self, resolver: FakeResolver, *, tries_s: Sequence[float] = (20,), **limits) -> None:
        self.resolver, self.clock = resolver, Clock()
        self.opened: list[tuple[str, str, str, int]] = []
        self.learn_fails = False
        self._records, feed = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._records.setblocking(False)
        limits = {"queries_per_s": 1e6, "queries_burst": 1e6, "time_share": 1e6, "time_burst_s": 1e6, **limits}
        self.world = World(
            upstream=Upstream([resolver.resolver], clock=self.clock, tries_s=tries_s),
            feed=Feed(feed, clock=self.clock),
            learn=self._learn,
            clock=self.clock,
            limits=Limits(**limits),
        )
        self.forwarders: dict[str, SandboxForwarder] = {}

    def close(self) -> None:
        self.world.feed.close()
        self._records.close()

    def add(self, network="internet", *, sandbox: str = SANDBOX, exemptions=(), **rest) -> SandboxForwarder:
        given = network if isinstance(network, EffectivePolicy) else policy(network, **rest)
        made = SandboxForwarder(sandbox, given, world=self.world, exemptions=exemptions)
        self.forwarders[sandbox] = made
        return made

    async def _learn(self, sandbox, name, addresses) -> None:
        if self.learn_fails:
            raise TimeoutError
        self.opened += [(sandbox, name, str(address), ttl_s) for address, ttl_s in addresses]

    async def ask(self, name: str, rdtype: str = "A", *, sandbox: str = SANDBOX, stream: bool = False, **rest):
        rest.setdefault("use_edns", 0)
        if not rest.pop("edns", True):
            rest["use_edns"] = None
        query = dns.message.make_query(name, rdtype, **rest)
        answer = dns.message.from_wire(await self.send(query.to_wire(), sandbox=sandbox, stream=stream))
        assert answer.id == query.id
        assert answer.flags & dns.flags.QR
        assert answer.question == query.question
        assert answer.question[0].name.labels == query.question[0].name.labels  # in the case in which it was asked
        return answer

    async def send(self, data: bytes, *, sandbox: str = SANDBOX, stream: bool = False) -> bytes:
        forwarder = self.forwarders[sandbox]
        query = forwarder.read(data, is_stream=stream)
        if not isinstance(query, Query):
            assert query is not None, "not answered"
            return query
        return forwarder.answer_now(query) or await forwarder.answer_later(query)

    def records(self) -> list[dict]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(json.loads(self._records.recv(65536)))
        return found


def addresses(answer: dns.message.Message) -> list[str]:
    return sorted(record.address for rrset in answer.answer if rrset.rdtype == dns.rdatatype.A for record in rrset)


def words(answer: dns.message.Message) -> tuple[int, str]:
    """The extended error."""
    errors = [option for option in answer.options if option.otype == 15]
    assert len(errors) == 1
    return int(errors[0].code), errors[0].text


def exemption(name: str, address: str, port: int = 443) -> Exemption:
    return Exemption(name=name, address=ipaddress.IPv4Address(address), port=port)
