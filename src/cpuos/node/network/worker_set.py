"""The three unprivileged workers of a node, and what each is given of every slot.

A worker that is down is no reason to fail a call: the kernel refuses what it would have served, and it is given all
slots anew when it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

import structlog

from cpuos.errors import NotFound, PlatformError
from cpuos.node.listening import listen
from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.log_sockets import open_end_socket
from cpuos.node.network.policy_rules import NamedAddress
from cpuos.node.network.router import Counters
from cpuos.node.network.slot import router_name
from cpuos.node.network.sockets import close_all, open_for_workers
from cpuos.node.network.surroundings import Surroundings
from cpuos.node.network.taken import TakenSlot
from cpuos.node.network.workers.calls import Done, Operation
from cpuos.node.network.workers.channel import Descriptors, Message
from cpuos.node.network.workers.lockdown import confinement_of
from cpuos.node.network.workers.messages import (
    Close,
    Host,
    Hub,
    Learn,
    Learned,
    LearnedName,
    Open,
    PolicyChange,
    RouterCounts,
    Sockets,
    Start,
    WantCounts,
    WantSockets,
)
from cpuos.node.network.workers.supervisor import StartCall, Worker
from cpuos.types.blocked import Exemption
from cpuos.types.network import EffectivePolicy

__all__ = ["WorkerConfig", "WorkerSet"]

A = TypeVar("A", bound=Message)
log = structlog.get_logger("cpuos.node.network")

SOCKET_MODE = 0o660
RECORDS, DNS, PEEK = "records", "dns", "peek"
_DESCRIPTORS = {RECORDS: 8192, DNS: 8192, PEEK: 1 << 16}
"""The peek holds two for each connection."""
_SO_SNDBUFFORCE = 32  # asm-generic/socket.h
_FEED_BYTES = 4 << 20
"""About 5,000 reports wait in a feed before one is lost."""
_LETTERS_A_ROW, _MOST_LETTERS = 60, 500_000
FIRST_START_S = 15.0
"""How long after a daemon's start new sandboxes wait for workers that are still being started."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    resolvers: tuple[IPv4Address, ...]
    exemptions: tuple[Exemption, ...]
    state_dir: Path
    """Of the records worker."""
    socket_path: Path
    """Where the records worker serves."""
    peer_uids: tuple[int, ...]
    """Who may ask there, beside root."""
    limits: NetworkLimits = field(default_factory=NetworkLimits)
    """Of each sandbox."""


class WorkerSet:
    """Started and ended with the daemon. `slots` is what a worker that comes back is given."""

    def __init__(self, config: WorkerConfig, *, hub: Path, slots: Callable[[], Mapping[str, TakenSlot]]) -> None:
        self._config = config
        self._hub = hub
        self._slots = slots
        self._surroundings = Surroundings()
        self._feeds: dict[str, tuple[socket.socket, socket.socket]] = {}
        self._records: socket.socket | None = None
        self._patient_until = 0.0
        self._starting: asyncio.Task[None] | None = None
        self._processes: Counter[str] = Counter()
        """By worker: how many processes of it there were."""
        questions: dict[str, list[Operation[Any]]] = {
            DNS: [Operation(Learn, self._learn)],
            PEEK: [Operation(WantSockets, self._give_sockets)],
            RECORDS: [Operation(WantCounts, self._give_counts)],
        }
        self.workers = {
            name: Worker(
                name,
                start=lambda name=name: self._start_call(name),  # type: ignore[misc]
                questions=questions.get(name, ()),
                on_restart=self._replay,
                descriptors=_DESCRIPTORS[name],
            )
            for name in (RECORDS, DNS, PEEK)
        }

    def start(self, surroundings: Surroundings) -> None:
        """Begin: the daemon answers meanwhile, and the first slots wait."""
        self._surroundings = surroundings
        for name in (DNS, PEEK):
            self._feeds[name] = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            with contextlib.suppress(PermissionError):
                self._feeds[name][1].setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _FEED_BYTES)
        self._records = self._listen_for_records()
        self._patient_until = asyncio.get_running_loop().time() + FIRST_START_S
        self._starting = asyncio.create_task(self._start_all(), name="cpuos-network-workers")

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self.workers.values()))
        for pair in self._feeds.values():
            for end in pair:
                end.close()
        self._feeds.clear()
        if self._records is not None:
            self._records.close()
            self._records = None

    # what holds for one slot

    async def wait_started(self) -> None:
        """A daemon that has just begun gives its first new sandboxes workers that serve them."""
        patience_s = self._patient_until - asyncio.get_running_loop().time()
        if self._starting is not None and not self._starting.done() and patience_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._starting), patience_s)

    async def open(self, sandbox_id: str, slot: TakenSlot) -> None:
        """Give a slot with its policy to all that serve now; the others get it when they come."""
        async with slot.lock:
            await self._open_in([worker for worker in self.workers.values() if worker.is_ready], sandbox_id, slot)

    async def change(self, sandbox_id: str, policy: EffectivePolicy) -> list[NamedAddress]:
        """Tell them of a new policy: first the forwarder. What it knows to have told the guest, which is nothing where
        there is none now, or one that was not given this slot yet."""
        change = PolicyChange(sandbox=sandbox_id, policy=policy)
        answer = await self._tell(DNS, change, answer=Learned)
        await asyncio.gather(self._tell(PEEK, change), self._tell(RECORDS, change))
        learned = answer.learned if answer is not None else []
        return [NamedAddress(name=row.name, address=row.address, ttl_s=row.ttl_s) for row in learned]

    async def shut(self, sandbox_id: str, slot: TakenSlot | None) -> None:
        """Let them close all they hold of a slot, after the kernel's counts have been compared with what was recorded.

        A worker that is being started is not given the slot any more.
        """
        if slot is not None:
            async with slot.lock:
                slot.is_closed = True
            await self._count(sandbox_id, slot)
        close = Close(sandbox=sandbox_id)
        await asyncio.gather(*(self._tell(name, close) for name in self.workers))

    async def set_surroundings(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        host = Host(host_addresses=list(surroundings.addresses), reach=list(surroundings.reach))
        await asyncio.gather(*(self._tell(name, host) for name in self.workers))

    # starting, and starting again

    async def _start_all(self) -> None:
        await asyncio.gather(*(self._start(worker) for worker in self.workers.values()))

    async def _start(self, worker: Worker) -> None:
        pause = 0.1
        while True:
            try:
                await worker.start()
                await self._replay(worker)
                return
            except PlatformError as problem:
                log.error("network worker does not start", worker=worker.name, why=problem.why, again_in_s=pause)
                await worker.close()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 10.0)

    def _start_call(self, name: str) -> StartCall:
        self._processes[name] += 1
        config = self._config
        message = Start(
            resolvers=list(config.resolvers),
            host_addresses=list(self._surroundings.addresses),
            reach=list(self._surroundings.reach),
            state_dir=str(config.state_dir) if name == RECORDS else "",
            socket_path=str(config.socket_path) if name == RECORDS else "",
            peer_uids=list(config.peer_uids) if name == RECORDS else [],
            limits=config.limits,
        )
        if name != RECORDS:
            return StartCall(message=message, descriptors=[self._feeds[name][1].fileno()])
        assert self._records is not None
        ends = [*(self._feeds[feeder][0] for feeder in (DNS, PEEK)), self._records]
        return StartCall(message=message, descriptors=[end.fileno() for end in ends])

    def _listen_for_records(self) -> socket.socket:
        """The node's own, so that those who ask wait while one worker follows another."""
        confinement = confinement_of(memory_mib=0, descriptors=0)
        state, place = self._config.state_dir, self._config.socket_path.parent
        if not state.is_dir():
            state.mkdir(mode=0o700, parents=True)
            os.chown(state, confinement.uid, confinement.gid)
        if not place.is_dir():
            place.mkdir(mode=0o750, parents=True)
            os.chown(place, -1, confinement.gid)
        return listen(self._config.socket_path, kind=socket.SOCK_STREAM, mode=SOCKET_MODE, gid=confinement.gid)

    async def _replay(self, worker: Worker) -> None:
        if worker.name == RECORDS:
            with await asyncio.to_thread(open_end_socket, self._hub) as ends:
                await worker.request(Hub(), descriptors=[ends.fileno()])
        given: set[TakenSlot] = set()
        # Again, for slots taken meanwhile: nobody else gives them to a worker that is not ready.
        while coming := [(sandbox_id, slot) for sandbox_id, slot in self._slots().items() if slot not in given]:
            for sandbox_id, slot in coming:
                given.add(slot)
                async with slot.lock:
                    await self._open_in([worker], sandbox_id, slot)

    async def _open_in(self, workers: Sequence[Worker], sandbox_id: str, slot: TakenSlot) -> None:
        wanting = [worker for worker in workers if slot.opened.get(worker.name) != self._processes[worker.name]]
        if slot.policy is None or slot.is_closed or not wanting:
            return
        message = Open(
            sandbox=sandbox_id,
            policy=slot.policy,
            exemptions=list(self._config.exemptions),
            slot_address=slot.plan.address,
            is_new=not slot.is_found and RECORDS not in slot.opened,
            learned=_told(slot),
        )
        messages = {PEEK: message.model_copy(update={"learned": []})}
        names = [worker.name for worker in wanting]
        try:
            opened = await asyncio.to_thread(open_for_workers, names, router_name(slot.folder))
        except OSError as problem:
            log.warning("slot not opened for workers", workers=names, sandbox=sandbox_id, why=str(problem))
            return
        try:
            await asyncio.gather(
                *(
                    self._hand_over(worker, slot, messages.get(worker.name, message), opened[worker.name])
                    for worker in wanting
                )
            )
        finally:
            close_all(opened)

    async def _hand_over(
        self, worker: Worker, slot: TakenSlot, message: Open, sockets: Sequence[socket.socket]
    ) -> None:
        process = self._processes[worker.name]
        try:
            await worker.request(message, descriptors=[one.fileno() for one in sockets])
            if worker.name == RECORDS:
                await self._compare_counts(message.sandbox, slot)
            slot.opened[worker.name] = process
        except PlatformError as problem:
            log.warning("slot not opened in worker", worker=worker.name, sandbox=message.sandbox, why=str(problem))

    async def _compare_counts(self, sandbox_id: str, slot: TakenSlot) -> None:
        """What a new records worker did not hear of, since the one before or an earlier daemon, is a gap."""
        if slot.counted_before is not None:
            await self._tell(RECORDS, _counts(sandbox_id, slot.counted_before))
            slot.counted_before = None
            await self._count(sandbox_id, slot, is_beginning=True)
        elif RECORDS in slot.opened:
            await self._count(sandbox_id, slot)

    async def _count(self, sandbox_id: str, slot: TakenSlot, *, is_beginning: bool = False) -> None:
        try:
            counters = await slot.counters()
        except (PlatformError, OSError) as problem:
            log.warning("router not counted", sandbox=sandbox_id, why=str(problem))
            return
        await self._tell(RECORDS, _counts(sandbox_id, counters, is_beginning=is_beginning))

    async def _tell(self, name: str, message: Message, *, answer: type[A] = Done) -> A | None:  # type: ignore[assignment]
        worker = self.workers.get(name)
        if worker is None:
            return None
        try:
            return await worker.request(message, answer=answer)
        except PlatformError as problem:
            log.warning("worker not told", worker=name, of=message.op, why=problem.why or problem.what)
            return None

    # what they ask

    async def _learn(self, message: Learn, descriptors: Descriptors) -> None:
        rows = [NamedAddress(name=message.name, address=row.address, ttl_s=row.ttl_s) for row in message.addresses]
        await self._slot(message.sandbox).learn(rows)

    async def _give_counts(self, message: WantCounts, descriptors: Descriptors) -> None:
        slot = self._slot(message.sandbox)
        if not slot.is_closed:  # its end counts
            await self._count(message.sandbox, slot)

    async def _give_sockets(self, message: WantSockets, descriptors: Descriptors) -> None:
        made = await self._slot(message.sandbox).peek_sockets(message.count)
        try:
            numbers = [one.fileno() for one in made]
            await self.workers[PEEK].request(Sockets(sandbox=message.sandbox), descriptors=numbers)
        finally:
            for one in made:
                one.close()

    def _slot(self, sandbox_id: str) -> TakenSlot:
        slot = self._slots().get(sandbox_id)
        if slot is None:
            raise NotFound(f"cannot find the slot of sandbox {sandbox_id}", code="sandbox_not_found")
        return slot


def _told(slot: TakenSlot) -> list[LearnedName]:
    """The newest of what its guest was told, as much as goes into one message beside the largest policy."""
    rows, letters = [], 0
    for entry in reversed(slot.told.all()):
        letters += len(entry.name) + _LETTERS_A_ROW
        if letters > _MOST_LETTERS:
            break
        rows.append(LearnedName(name=entry.name, address=entry.address, ttl_s=entry.ttl_s))
    return rows[::-1]


def _counts(sandbox_id: str, counters: Counters, *, is_beginning: bool = False) -> RouterCounts:
    refused = counters.refused + counters.limited
    return RouterCounts(sandbox=sandbox_id, allowed=counters.allowed, refused=refused, is_beginning=is_beginning)
