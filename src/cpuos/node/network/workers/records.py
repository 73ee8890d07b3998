"""The process that writes down connections: it reads what the kernels of all routers log, and what the hub's counts.

Start: the feeds of forwarder and peek, and the socket that it serves on. Open: the log socket of a router. Hub: the
socket that tells of ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cpuos.node.network.conntrack import read_flows
from cpuos.node.network.records.api import RecordsServer, create_api
from cpuos.node.network.records.book import Book
from cpuos.node.network.records.journal import RecordsJournal
from cpuos.node.network.records.nflog import read_packets
from cpuos.node.network.records.reports import read_report
from cpuos.node.network.workers.base import NodeLine, run_worker
from cpuos.node.network.workers.calls import CallFailed, Done, Operation
from cpuos.node.network.workers.channel import Breach, Descriptors
from cpuos.node.network.workers.messages import (
    Close,
    Host,
    Hub,
    Open,
    PolicyChange,
    RouterCounts,
    Start,
    WantCounts,
)

__all__ = ["RecordsWorker"]

_TICK_S = 0.25
_A_TURN, _A_DRAIN = 64, 20_000
_DATAGRAM = 256 << 10


class RecordsWorker:
    def __init__(self, node: NodeLine) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._book: Book | None = None
        self._feeds: list[socket.socket] = []
        self._logs: dict[str, _Log] = {}
        self._ends: socket.socket | None = None
        self._readers = _Readers()
        self._server: RecordsServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[None]] = set()

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(Start, self._start),
            Operation(Hub, self._take_hub),
            Operation(Host, self._host),
            Operation(Open, self._open),
            Operation(PolicyChange, self._change),
            Operation(RouterCounts, self._count),
            Operation(Close, self._shut),
        ]

    async def close(self) -> None:
        for task in (*self._tasks[1:], *self._asking):
            task.cancel()
        if self._book is not None:  # first of all: there may be little time
            for sandbox in [None, *self._logs]:
                self._drain(sandbox)
            self._book.finish(time.time())
        for log in self._logs.values():
            self._forget(log.socket)
        for one in (*self._feeds, *([self._ends] if self._ends else [])):
            self._forget(one)
        self._readers.close()
        if self._server is not None:
            self._server.should_exit = True
        await asyncio.gather(*self._tasks, *self._asking, return_exceptions=True)

    # what the node asks

    async def _start(self, message: Start, descriptors: Descriptors) -> None:
        folder = Path(message.state_dir)
        book = self._book = Book(lambda state: RecordsJournal(folder, state=state), now=time.time())
        book.host_addresses, book.reach = frozenset(message.host_addresses), tuple(message.reach)
        self._feeds = [descriptors.take_socket(), descriptors.take_socket()]
        for feed in self._feeds:
            self._readers.add(feed, lambda feed=feed: self._read_feed(feed, _A_TURN))  # type: ignore[misc]
        listener = descriptors.take_socket()
        self._server = RecordsServer(create_api(book, drain=self._drain), allowed_uids=message.peer_uids)
        self._tasks = [
            self._loop.create_task(self._server.serve(sockets=[listener])),
            self._loop.create_task(self._tick(book)),
        ]

    async def _take_hub(self, message: Hub, descriptors: Descriptors) -> None:
        ends = descriptors.take_socket()
        if self._ends is not None:
            self._forget(self._ends)
        self._ends = ends
        self._readers.add(ends, lambda: self._read_ends(ends))

    async def _host(self, message: Host, descriptors: Descriptors) -> None:
        book = self._require_book()
        book.host_addresses, book.reach = frozenset(message.host_addresses), tuple(message.reach)

    async def _open(self, message: Open, descriptors: Descriptors) -> None:
        book = self._require_book()
        log = _Log(descriptors.take_socket())
        earlier = self._logs.get(message.sandbox)
        if earlier is not None:
            self._read_log(message.sandbox, earlier, _A_DRAIN)
            self._forget(earlier.socket)
        book.open(
            message.sandbox,
            message.policy,
            exemptions=message.exemptions,
            address=message.slot_address,
            is_new=message.is_new,
        )
        for row in message.learned:
            book.learn(message.sandbox, row.name, row.address)
        self._logs[message.sandbox] = log
        self._readers.add(log.socket, lambda: self._read_log(message.sandbox, log, _A_TURN))

    async def _change(self, message: PolicyChange, descriptors: Descriptors) -> None:
        self._require_book().set_policy(message.sandbox, message.policy)

    async def _count(self, message: RouterCounts, descriptors: Descriptors) -> None:
        book = self._require_book()
        self._drain(message.sandbox)
        counted = {"allowed": message.allowed, "refused": message.refused, "is_beginning": message.is_beginning}
        book.count(message.sandbox, **counted, now=time.time())

    async def _shut(self, message: Close, descriptors: Descriptors) -> None:
        book = self._require_book()
        self._drain(message.sandbox)
        log = self._logs.pop(message.sandbox, None)
        if log is not None:
            self._forget(log.socket)
        book.close(message.sandbox, now=time.time())
        book.journal.flush()

    # reading

    def _drain(self, sandbox: str | None) -> None:
        """Read all that waits: of this sandbox' router, and of the feeds."""
        for feed in self._feeds:
            self._read_feed(feed, _A_DRAIN)
        log = self._logs.get(sandbox or "")
        if log is not None and sandbox is not None:
            self._read_log(sandbox, log, _A_DRAIN)
        self._require_book().journal.flush()

    def _read_feed(self, feed: socket.socket, most: int) -> None:
        book, now = self._require_book(), time.time()
        for datagram in _received(feed, most):
            report = read_report(datagram)
            if report is not None:
                book.take(report, now=now)

    def _read_log(self, sandbox: str, log: _Log, most: int) -> None:
        book, now = self._require_book(), time.time()
        for messages in _received(log.socket, most, on_overrun=lambda: book.floods.suspect(sandbox)):
            for packet in read_packets(messages):
                lost = log.lost_before(packet.sequence)
                if lost:
                    book.log_lost(sandbox, lost, now=now)
                book.log_packet(sandbox, packet, now=now)

    def _read_ends(self, ends: socket.socket) -> None:
        book, now = self._require_book(), time.time()
        for messages in _received(ends, _A_TURN, on_overrun=lambda: book.ends_lost(now=now)):
            for flow in read_flows(messages):
                book.end_flow(flow, now=now)

    def _forget(self, one: socket.socket) -> None:
        self._readers.remove(one)
        one.close()

    async def _tick(self, book: Book) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            book.settle(time.time())
            for sandbox in book.floods.due(self._loop.time()):
                asking = self._loop.create_task(self._want_counts(book, sandbox))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)

    async def _want_counts(self, book: Book, sandbox: str) -> None:
        """They come as a call of their own, `_count`."""
        try:
            await self._node.ask(WantCounts(sandbox=sandbox), answer=Done)
        except (CallFailed, TimeoutError):
            if sandbox in self._logs:
                book.floods.suspect(sandbox)

    def _require_book(self) -> Book:
        if self._book is None:
            raise Breach("the worker was not started")
        return self._book


class _Readers:
    """Sockets that are read when something waits. An overrun is told as an error of the socket, at which uvloop stops
    looking at it; so it looks at a poll of them all, which has no errors."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._reads: dict[int, Callable[[], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._poll.fileno(), self._turn)

    def add(self, one: socket.socket, read: Callable[[], None]) -> None:
        self._poll.register(one, select.EPOLLIN)
        self._reads[one.fileno()] = read

    def remove(self, one: socket.socket) -> None:
        if self._reads.pop(one.fileno(), None) is not None:
            self._poll.unregister(one)

    def close(self) -> None:
        self._loop.remove_reader(self._poll.fileno())
        self._poll.close()

    def _turn(self) -> None:
        for number, _ in self._poll.poll(0):
            read = self._reads.get(number)
            if read is not None:
                read()


class _Log:
    """A router's log socket, and how far its numbers have come."""

    def __init__(self, log: socket.socket) -> None:
        self.socket = log
        self._next = 0

    def lost_before(self, sequence: int | None) -> int:
        if sequence is None:
            return 0
        lost = (sequence - self._next) & 0xFFFFFFFF
        self._next = (sequence + 1) & 0xFFFFFFFF
        return lost if lost < 1 << 31 else 0


def _received(one: socket.socket, most: int, *, on_overrun: Callable[[], None] = lambda: None) -> Iterator[bytes]:
    """Up to so many datagrams that wait."""
    for _ in range(most):
        try:
            data = one.recv(_DATAGRAM)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            if problem.errno == errno.ENOBUFS:  # the kernel had more than fits
                on_overrun()
                continue
            return
        if not data:
            return
        yield data


def _preload() -> None:
    """What the HTTP server loads when it starts."""
    import uvicorn.lifespan.off
    import uvicorn.loops.auto
    import uvicorn.protocols.http.httptools_impl
    import uvicorn.protocols.websockets.auto

    with contextlib.suppress(Exception):
        "a.test".encode("idna")
    assert uvicorn


if __name__ == "__main__":
    run_worker(RecordsWorker, preload=_preload)
