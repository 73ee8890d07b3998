"""Questions to the configured public resolvers: over UDP from a fresh port each, again over TCP when cut or doubtful.

Whoever answers in a resolver's name must guess port, number and the case of every letter.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpuos.node.network.forwarder.query import CLASS_IN, HEADER, MAX_UDP_BYTES, Rcode, Rdtype

__all__ = ["Resolver", "Upstream", "UpstreamFailed"]

_TC, _QR, _RD = 0x0200, 0x8000, 0x0100
_ANSWERED = (Rcode.NOERROR, Rcode.NXDOMAIN)
_TRIES_S = (0.8, 1.2, 1.5)
"""How long the first, second and third resolver have: together within what a guest's resolver waits."""
_STREAM_S = 2.0
_DEMOTED_S = 30.0
_MAX_FORGED = 16
_MAX_ANSWER_BYTES = 16 << 10
_OPT = struct.Struct(">BHHBBHH")
_DO = 0x8000


class UpstreamFailed(Exception):
    """Nobody answered; the text is for logs and extended errors."""


class _Doubtful(Exception):
    """Cut, or not quite what was asked: TCP tells."""


@dataclass(frozen=True)
class Resolver:
    address: str
    port: int = 53


class Upstream:
    """`ask` gives the bytes of an answer whose question is the one that was asked; nothing else in it was looked at."""

    def __init__(
        self,
        resolvers: Sequence[Resolver],
        *,
        clock: Callable[[], float],
        tries_s: Sequence[float] = _TRIES_S,
    ) -> None:
        self._resolvers, self._clock, self._tries_s = tuple(resolvers), clock, tuple(tries_s)
        self._demoted_until = dict.fromkeys(self._resolvers, 0.0)

    async def ask(self, name: str, rdtype: int, *, dnssec_ok: bool) -> bytes:
        """Raises UpstreamFailed."""
        problem = "no resolver is configured"
        for resolver, limit_s in zip(self._in_order(), self._tries_s, strict=False):
            message, question = _write(name, rdtype, dnssec_ok=dnssec_ok)
            try:
                answer = await self._ask_one(resolver, message, question, limit_s=limit_s)
            except (OSError, TimeoutError, EOFError, _Doubtful) as failure:
                problem = f"{resolver.address}: {failure or type(failure).__name__}"
                self._demoted_until[resolver] = self._clock() + _DEMOTED_S
                continue
            if answer[3] & 15 in _ANSWERED:
                self._demoted_until[resolver] = 0.0
                return answer
            problem = f"{resolver.address}: rcode {answer[3] & 15}"
        raise UpstreamFailed(problem)

    def _in_order(self) -> list[Resolver]:
        now = self._clock()
        return sorted(self._resolvers, key=lambda resolver: self._demoted_until[resolver] > now)

    async def _ask_one(self, resolver: Resolver, message: bytes, question: bytes, *, limit_s: float) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                return await _ask_datagram(resolver, message, question)
        except _Doubtful:
            async with asyncio.timeout(_STREAM_S):
                return await _ask_stream(resolver, message, question)


def _write(name: str, rdtype: int, *, dnssec_ok: bool) -> tuple[bytes, bytes]:
    """A message with a random number and random case, and its question."""
    bits = secrets.randbits(256)
    labels = []
    for label in name.split(".") if name else []:
        mixed = bytes(ord(c.upper() if bits >> (i & 255) & 1 else c) for i, c in enumerate(label))
        bits = bits >> 7 | (bits & 127) << 249
        labels.append(bytes([len(mixed)]) + mixed)
    question = b"".join(labels) + b"\0" + struct.pack(">HH", rdtype, CLASS_IN)
    opt = _OPT.pack(0, Rdtype.OPT, MAX_UDP_BYTES, 0, 0, _DO if dnssec_ok else 0, 0)
    return HEADER.pack(secrets.randbits(16), _RD, 1, 0, 0, 1) + question + opt, question


async def _ask_datagram(resolver: Resolver, message: bytes, question: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sender:
        # Connected: the kernel chooses a random port and takes nothing from other addresses.
        sender.connect((resolver.address, resolver.port))
        sender.send(message)
        answer: asyncio.Future[bytes] = loop.create_future()
        forged = 0

        def read() -> None:
            nonlocal forged
            try:
                data = sender.recv(65535)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as problem:
                if not answer.done():
                    answer.set_exception(problem)
                return
            if answer.done():
                return
            if _fits(data, message, question, with_case=True):
                answer.set_result(data)
            elif data[:2] == message[:2] or forged >= _MAX_FORGED:
                answer.set_exception(_Doubtful("an answer to another question"))
            else:
                forged += 1

        loop.add_reader(sender.fileno(), read)
        try:
            data = await answer
        finally:
            loop.remove_reader(sender.fileno())
    if HEADER.unpack_from(data)[1] & _TC or len(data) > _MAX_ANSWER_BYTES:
        raise _Doubtful("cut")
    return data


async def _ask_stream(resolver: Resolver, message: bytes, question: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(resolver.address, resolver.port, limit=_MAX_ANSWER_BYTES)
    try:
        writer.write(struct.pack(">H", len(message)) + message)
        length = int.from_bytes(await reader.readexactly(2), "big")
        if length > _MAX_ANSWER_BYTES:
            raise _Doubtful(f"{length} bytes are too long")
        data = await reader.readexactly(length)
    finally:
        writer.transport.abort()
    # Nobody forges within a connection; some resolvers do not keep the case.
    if not _fits(data, message, question, with_case=False):
        raise _Doubtful("an answer to another question")
    return data


def _fits(data: bytes, message: bytes, question: bytes, *, with_case: bool) -> bool:
    if len(data) < HEADER.size:
        return False
    number, flags, questions, *_ = HEADER.unpack_from(data)
    asked = data[HEADER.size : HEADER.size + len(question)]
    return (
        number == HEADER.unpack_from(message)[0]
        and bool(flags & _QR)
        and not flags >> 11 & 15
        and questions == 1
        and (asked == question if with_case else asked.lower() == question.lower())
    )
