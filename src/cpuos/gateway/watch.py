"""File events from an agent to one client, each checked; what a slow client cannot take becomes `overflow`."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable

from cpuos.errors import CpuosError
from cpuos.gateway.agent.answers import read_answer, refusal
from cpuos.gateway.agent.client import AgentClient
from cpuos.gateway.agent.connection import AgentConnection, agent_unresponsive
from cpuos.gateway.agent.http import agent_invalid
from cpuos.gateway.calls import Call
from cpuos.gateway.follow import KEEPALIVE
from cpuos.types.files import FileEvent
from cpuos.types.frames import FrameKind, encode_frame

__all__ = ["send_events"]

MAX_HELD_EVENTS = 1000
KEEPALIVE_S = 5.0
FRAMES = [(b"content-type", b"application/vnd.cpuos.frames"), (b"cache-control", b"no-store")]
_OVERFLOW = encode_frame(FrameKind.EVENT, b'{"kind":"overflow","path":"","raw":null,"moved_to":null}')


class _Events:
    """Frame sink: holds a bounded number of events for the client."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.held: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.error: CpuosError | None = None
        self.ended = False
        self.connection: AgentConnection | None = None
        self._overflown = False

    def opened(self, connection: AgentConnection) -> None:
        self.connection = connection

    def frame(self, kind: FrameKind, offset: int, payload: memoryview | bytes) -> None:
        if kind is FrameKind.KEEPALIVE or kind is FrameKind.STARTED:
            return
        if kind is FrameKind.ERROR:
            self.error = refusal(bytes(payload), what=self._what)
            return
        if kind is not FrameKind.EVENT:
            raise agent_invalid(f"frame {kind.name} does not belong to a watch")
        event: FileEvent = read_answer(FileEvent, payload)
        if len(self.held) < MAX_HELD_EVENTS:
            self._overflown = False
            self.held.append(encode_frame(FrameKind.EVENT, event.model_dump_json().encode()))
        elif not self._overflown:
            self._overflown = True
            self.held.append(_OVERFLOW)
        self.news.set()

    def cut(self, error: CpuosError | None) -> None:
        self.connection = None
        self.error = self.error or error
        self.ended = True
        self.news.set()


async def send_events(
    call: Call, agent: AgentClient, target: str, *, what: str, explain: Callable[[CpuosError], CpuosError]
) -> None:
    """Stream events until the client leaves or the watch ends; `explain` says why the agent was cut off."""
    events = _Events(what)
    await agent.stream("GET", target, sink=events, what=what)
    gone = call.gone()
    gone.add_done_callback(lambda _: events.news.set())
    try:
        await call.begin(200, FRAMES)
        await call.put(KEEPALIVE)  # the watch stands
        while not gone.done():
            if events.held:
                batch = b"".join(events.held)
                events.held.clear()
                await call.put(batch)
            elif events.ended:
                error = explain(events.error or agent_unresponsive("it ended the watch"))
                await call.put(encode_frame(FrameKind.ERROR, json.dumps(error.body()).encode()), last=True)
                return
            else:
                events.news.clear()
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await events.news.wait()
                except TimeoutError:
                    await call.put(KEEPALIVE)
    finally:
        if events.connection is not None:
            events.connection.close()
