"""The frame of a worker process: `python -m cpuos.node.network.workers.NAME FD CONFINEMENT`.

class DnsWorker:                         # one that serves a channel
    def __init__(self, node: NodeLine) -> None: ...
    def operations(self) -> list[Operation[Any]]: ...
    async def close(self) -> None: ...

if __name__ == "__main__":
    run_worker(DnsWorker)
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from cpuos.node.network.workers.calls import NODE, WORKER, Calls, Done, Operation
from cpuos.node.network.workers.channel import Descriptors, Message, channel_pair
from cpuos.node.network.workers.lockdown import Confinement, lock_down
from cpuos.node.network.workers.messages import Ping

__all__ = ["ASK_TIMEOUT_S", "NodeLine", "WorkerPart", "run_worker", "serve_node"]

ASK_TIMEOUT_S = 5.0
_MOST_QUESTIONS = 128  # at once; the node bears a few times as many

A = TypeVar("A", bound=Message)


class NodeLine:
    """The way back to the node, for questions."""

    def __init__(self) -> None:
        self._calls: Calls | None = None
        self._places = asyncio.Semaphore(_MOST_QUESTIONS)

    async def ask(self, question: Message, *, answer: type[A], timeout_s: float = ASK_TIMEOUT_S) -> A:
        """Raises CallFailed or TimeoutError."""
        assert self._calls is not None
        async with self._places:
            return await self._calls.call(question, answer=answer, timeout_s=timeout_s)

    def bind(self, calls: Calls) -> None:
        self._calls = calls


class WorkerPart(Protocol):
    """What a worker is beside its frame."""

    def operations(self) -> list[Operation[Any]]:
        """What the node may ask; handled one after the other, in the order in which it came."""
        ...

    async def close(self) -> None: ...


async def serve_node(end: socket.socket, create: Callable[[NodeLine], WorkerPart]) -> None:
    """Until the node goes away."""
    line, ended = NodeLine(), asyncio.Event()
    part = create(line)
    operations = {operation.message.op: operation for operation in (*part.operations(), Operation(Ping, _ping))}
    calls = Calls(end, side=WORKER, operations=operations, on_end=lambda problem: ended.set())
    line.bind(calls)
    try:
        await ended.wait()
    finally:
        await calls.close()
        await part.close()


def run_worker(create: Callable[[NodeLine], WorkerPart], *, preload: Callable[[], None] = lambda: None) -> None:
    """The whole process. `preload` loads what is otherwise imported late: after the lockdown it may not be readable."""
    import uvloop

    end = socket.socket(fileno=int(sys.argv[1]))
    confinement = Confinement(**json.loads(sys.argv[2]))
    preload()
    # A channel can be opened and an answer made: what that imports late is loaded too.
    uvloop.run(_rehearse())
    lock_down(confinement)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the node, which ends this process
    uvloop.run(serve_node(end, create))


async def _ping(message: Ping, descriptors: Descriptors) -> None:
    return None


class _Nothing:
    def operations(self) -> list[Operation[Any]]:
        return []

    async def close(self) -> None:
        return None


async def _rehearse() -> None:
    ours, theirs = channel_pair()
    serving = asyncio.create_task(serve_node(theirs, lambda line: _Nothing()))
    node = Calls(ours, side=NODE, operations={}, on_end=lambda problem: None)
    await node.call(Ping(), answer=Done, timeout_s=5)
    await node.close()
    await serving
