"""What a guest sends on one connection, on its way to the server: held until a host name is read and allowed.

Pure: bytes in, bytes out. TLS is let through from the first hello on, plain HTTP request by request. Where a port is
open for a name by an explicit rule ("git.example.com:22"), what is neither passes unread: the kernel brought it here
because the forwarder answered an allowed name with that address.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address

from cpuos.node.network.judge import Judge, Judgement
from cpuos.node.network.peek.hello import HelloParser, SecondHello
from cpuos.node.network.peek.http_requests import Finals, RequestHead, RequestStream
from cpuos.types.network import NetworkMode
from cpuos.types.targets import NAME_PORTS

__all__ = ["Gate", "Refused", "Speech"]

_TLS_PORT = 443
_MAX_FIRST_LINE = 8 << 10
_TEXT = re.compile(rb"[\t\r\n\x20-\x7e\x80-\xff]*")
_HANDSHAKE = 0x16


class Refused(Exception):
    """The connection may not go on."""

    def __init__(self, rule: str, *, name: str | None = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.name = name


class Speech(StrEnum):
    UNKNOWN = "unknown"
    """Not enough has been said."""
    TLS = "tls"
    HTTP = "http"
    UNREAD = "unread"


@dataclass(frozen=True, kw_only=True)
class _Passed:
    """What was judged last: judged again when the policy changes."""

    name: str | None
    grants: frozenset[str]


class Gate:
    """`judge` gives the policy that holds now."""

    def __init__(self, address: IPv4Address, port: int, *, judge: Callable[[], Judge]) -> None:
        self._address, self._port, self._judge = address, port, judge
        self._feed: Callable[[bytes], bytes] = self._feed_first
        self._first = bytearray()
        self._hello = HelloParser()
        self._held = bytearray()
        self._requests = RequestStream(port)
        self._finals: Finals | None = None
        self._passed: _Passed | None = None
        self.speech = Speech.UNKNOWN
        self.is_transparent = False
        """Whatever comes now may pass: nothing needs to be fed any more."""
        self.is_holding = False
        """Nothing more should be fed before the server has answered."""

    @property
    def must_name(self) -> bool:
        """Whether a name has to be read before the server is spoken to."""
        return self._port in NAME_PORTS

    @property
    def is_decided(self) -> bool:
        """What was said so far is allowed; later requests are judged as they come."""
        return self._passed is not None

    @property
    def has_begun(self) -> bool:
        """The guest has said something."""
        return bool(self._first)

    @property
    def name(self) -> str | None:
        return self._passed.name if self._passed is not None else None

    def feed(self, data: bytes) -> bytes:
        """What of it, and of what was held before, goes on to the server. Raises Refused."""
        try:
            return self._feed(data)
        except ValueError as problem:
            raise Refused(f"no host name can be read: {problem}", name=self.name) from None

    def end(self) -> bytes:
        """The guest has said all that it will; what of that goes on. Raises Refused."""
        if self.speech is Speech.UNKNOWN and self._first and not self.must_name:
            self.speech = Speech.UNREAD
            return self._pass_first()
        return b""

    def see_answer(self, data: bytes) -> bytes | None:
        """What the server sends while the gate is holding; what may then go on to it, or None while it still holds."""
        assert self._finals is not None
        try:
            status = self._finals.feed(data)
        except ValueError as problem:
            raise Refused(f"no host name can be read: {problem}", name=self.name) from None
        if status is None:
            return None
        self.is_holding = False
        if status == 101:
            self.is_transparent = True
            return self._requests.take_rest()
        return self.feed(b"")

    def pass_unread(self) -> Judgement:
        """The guest says nothing, so the server may speak first. Raises Refused where a name has to be read."""
        judgement = _judge_unread(self._judge(), self._address, self._port)
        if not judgement.allowed:
            raise Refused(judgement.rule)
        self._passed = _Passed(name=None, grants=_grants(self._judge(), self._port))
        return judgement

    def judge_again(self) -> Judgement:
        """Under the policy that holds now. Before anything was judged, everything may go on waiting."""
        if self._passed is None:
            return Judgement(allowed=True, rule="")
        if self.speech in (Speech.TLS, Speech.HTTP):
            return self._judge_name(self._passed.name)
        judgement = _judge_unread(self._judge(), self._address, self._port)
        if judgement.allowed and _grants(self._judge(), self._port) != self._passed.grants:
            # Which of the names it was is not known, so it may be the one that is gone.
            return Judgement(allowed=False, rule=f"the names allowed on port {self._port} have changed")
        return judgement

    # how the feed goes on, step by step

    def _feed_first(self, data: bytes) -> bytes:
        self._first += data
        self.speech = self._tell_speech()
        if self.speech is Speech.UNKNOWN:
            return b""
        if self.speech is Speech.TLS:
            self._feed = self._feed_hello
            return self._feed_hello(bytes(self._first))
        if self.speech is Speech.HTTP:
            self._feed = self._feed_requests
            return self._feed_requests(bytes(self._first))
        return self._pass_first()

    def _pass_first(self) -> bytes:
        self.pass_unread()
        self.is_transparent = True
        return bytes(self._first)

    def _tell_speech(self) -> Speech:
        first = bytes(self._first[:_MAX_FIRST_LINE])
        if not first:
            return Speech.UNKNOWN
        if self._port == _TLS_PORT or first[0] == _HANDSHAKE or (first[0] & 0x80 and first[2:3] == b"\1"):
            return Speech.TLS
        if self._port in NAME_PORTS:
            return Speech.HTTP
        if not _TEXT.fullmatch(first):
            return Speech.UNREAD
        line, ended, _ = first.lstrip(b"\r\n").partition(b"\n")
        if b"HTTP/" in line.upper():
            return Speech.HTTP  # strictly read from here on, or refused
        return Speech.UNREAD if ended or len(first) == _MAX_FIRST_LINE else Speech.UNKNOWN

    def _feed_hello(self, data: bytes) -> bytes:
        self._held += data
        hello = self._hello.feed(data)
        if hello is None:
            return b""
        if hello.name is None:
            raise Refused("no host name can be read: the TLS hello has none")
        self._allow(hello.name)
        self._second = SecondHello(hello)
        rest = self._hello.rest
        held = bytes(self._held)
        self._held.clear()
        self._feed = self._feed_second
        return held[: len(held) - len(rest)] + self._feed_second(rest)

    def _feed_second(self, data: bytes) -> bytes:
        passed = self._second.feed(data)
        self.is_transparent = self._second.is_over
        return passed

    def _feed_requests(self, data: bytes) -> bytes:
        passed = bytearray()
        for found in self._requests.feed(data):
            if isinstance(found, bytes):
                passed += found
                continue
            self._allow_head(found)
            passed += found.wire
            if found.asks_for_websocket:
                self._finals = Finals()
                self.is_holding = True
                break  # the rest is a request, or no HTTP at all: the server's answer tells
        return bytes(passed)

    def _allow_head(self, head: RequestHead) -> None:
        if head.address is None:
            self._allow(head.host)
        elif head.address == self._address:
            self._allow(None)
        else:
            raise Refused("the request is for another address than it is sent to", name=None)

    def _allow(self, name: str | None) -> None:
        judgement = self._judge_name(name)
        if not judgement.allowed:
            raise Refused(judgement.rule, name=name)
        self._passed = _Passed(name=name, grants=frozenset())

    def _judge_name(self, name: str | None) -> Judgement:
        names = [] if name is None else [name]
        return self._judge().destination(self._address, protocol="tcp", port=self._port, names=names)


def _judge_unread(judge: Judge, address: IPv4Address, port: int) -> Judgement:
    if port in NAME_PORTS:
        return Judgement(allowed=False, rule="no host name can be read: none was said")
    rule = "internet"
    for layer in judge.layers:
        denied = next((t for t in layer.deny if t.covers_address(address) and t.covers_port("tcp", port)), None)
        if denied is not None:
            return Judgement(allowed=False, rule=f"{layer.origin} deny {denied.text}")
        if layer.mode is NetworkMode.OFF:
            return Judgement(allowed=False, rule=f"{layer.origin} network off")
        if layer.mode is NetworkMode.ALLOWLIST:
            candidates = (t for t in layer.allow if t.name is not None or t.covers_address(address))
            allowed = next((t for t in candidates if t.covers_port("tcp", port)), None)
            if allowed is None:
                return Judgement(allowed=False, rule=f"not in the {layer.origin} allow list")
            rule = f"{layer.origin} allow {allowed.text}"
    return Judgement(allowed=True, rule=rule)


def _grants(judge: Judge, port: int) -> frozenset[str]:
    """What opens a port for names, in every layer."""
    return frozenset(
        f"{number} {layer.origin} {target.text}"
        for number, layer in enumerate(judge.layers)
        for target in layer.allow
        if target.covers_port("tcp", port)
    )
