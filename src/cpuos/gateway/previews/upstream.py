"""Connections to servers inside: a tunnel and the HTTP that is spoken through it, kept for the next request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import h11

from cpuos.errors import PortProblem
from cpuos.gateway.agent.streams import ByteStream
from cpuos.gateway.previews.hosts import Place
from cpuos.gateway.sandbox import GatewaySandbox

__all__ = ["MAX_ANSWER_HEAD_BYTES", "Upstream", "Upstreams", "answer_invalid"]

MAX_ANSWER_HEAD_BYTES = 64 << 10
MAX_KEPT = 8
"""Idle connections of one port."""
KEPT_S = 4.0
"""Servers close idle connections after 5 s (Node, uvicorn) or later; a request must not meet that end."""


def answer_invalid(why: str) -> PortProblem:
    """The one error for a server inside that breaks HTTP."""
    return PortProblem("cannot show the answer of the server in the sandbox", why, code="port_answer_invalid")


@dataclass(kw_only=True, eq=False)
class Upstream:
    """One connection to one server; a request and its answer at a time."""

    stream: ByteStream
    http: h11.Connection
    used: bool = False
    """It bore a request before: the server may be about to close it."""
    answered: bool = False
    """Something of an answer to the present request came."""
    since: float = 0.0

    def send(self, event: h11.Event) -> None:
        pieces = self.http.send_with_data_passthrough(event)
        self.stream.write_pieces(pieces or [])

    @property
    def reusable(self) -> bool:
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE and self.stream.idle


class Upstreams:
    """The idle ones of all sandboxes. A tunnel that ends, by its server or with its sandbox, leaves by itself."""

    def __init__(self) -> None:
        self._idle: dict[tuple[Place, int], list[Upstream]] = {}

    async def take(self, sandbox: GatewaySandbox, place: Place, *, fresh: bool = False) -> Upstream:
        """A connection to the server at that place; raises when none listens there."""
        kept = self._idle.get((place, sandbox.generation), [])
        while kept and not fresh:
            upstream = kept.pop()
            if upstream.stream.idle and time.monotonic() - upstream.since < KEPT_S:
                upstream.stream.when_ended = None
                return upstream
            upstream.stream.abort()
        agent = await sandbox.agent()
        stream = await agent.tunnel(place.port)
        return Upstream(stream=stream, http=h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_ANSWER_HEAD_BYTES))

    def give(self, upstream: Upstream, sandbox: GatewaySandbox, place: Place) -> None:
        """Keep it for the next request where it can bear one, else end it."""
        key = (place, sandbox.generation)
        kept = self._idle.setdefault(key, [])
        if not upstream.reusable or len(kept) >= MAX_KEPT or sandbox.ended is not None:
            upstream.stream.abort()
            if not kept:
                self._idle.pop(key, None)
            return
        upstream.http.start_next_cycle()
        upstream.used, upstream.answered, upstream.since = True, False, time.monotonic()
        kept.append(upstream)

        def drop() -> None:
            if upstream in kept:
                kept.remove(upstream)
            if not kept:
                self._idle.pop(key, None)
            upstream.stream.abort()

        upstream.stream.when_ended = drop
        asyncio.get_running_loop().call_later(KEPT_S, self._expire, upstream, drop)

    def close(self) -> None:
        for kept in list(self._idle.values()):
            for upstream in list(kept):
                upstream.stream.abort()
        self._idle.clear()

    @staticmethod
    def _expire(upstream: Upstream, drop: object) -> None:
        if upstream.stream.when_ended is drop and time.monotonic() - upstream.since >= KEPT_S - 0.01:
            drop()  # type: ignore[operator]
