"""A control plane in process: real database, real application; node and gateway are fakes that can be made to fail."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2

from cpuos.errors import Conflict, CpuosError, NotFound, SandboxGone, Unavailable
from cpuos.node.client import Changes
from cpuos.server.app import create_app, create_routes
from cpuos.server.connections import RecordsPage
from cpuos.server.control_plane import ControlPlane, ServerOptions, open_control_plane
from cpuos.server.first_start import make_first_key
from cpuos.server.gateway import JournalPage, SandboxActivity, Suspended, Wake, WakesPage
from cpuos.testing.waiting import until
from cpuos.types.network import EffectivePolicy
from cpuos.types.node import (
    NodeFacts,
    NodeSandboxCreate,
    PoolFacts,
    Restored,
    RuntimeFacts,
    SandboxFacts,
    SandboxStats,
    SandboxUsage,
    SnapshotFacts,
    TemplateFacts,
    Usage,
    VolumeFacts,
)
from cpuos.types.sandbox import Isolation, StartedFrom
from cpuos.types.storage import NodeStorage, StorageItem, StorageKind


class ManualClock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(microseconds=1)
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class Gate:
    """Open until it is closed."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.waiting = 0

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1


class FakeNode:
    """Sandboxes as facts in memory, with the node's fences: generations, idempotent delete, numbered changes."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, SandboxFacts] = {}
        self.policies: dict[str, EffectivePolicy] = {}
        self.fenced: dict[str, int] = {}
        self.used: dict[str, Usage] = {}
        self.log: list[SandboxFacts] = []
        self.reachable = True
        self.create_error: CpuosError | None = None
        self.create_gate = asyncio.Event()
        self.create_gate.set()
        self.answer_gate = asyncio.Event()
        self.answer_gate.set()
        self.calls: Counter[str] = Counter()
        self.capacity = {"cpu": 16, "memory_mib": 65536, "disk_mib": 1 << 20, "max_sandboxes": 1000}
        self.templates = ["base", "python"]
        self.built: dict[str, bytes] = {}
        self.runtimes = [
            RuntimeFacts(name="gvisor", available=True, isolation=Isolation.GVISOR, detail="systrap"),
            RuntimeFacts(
                name="firecracker", available=False, isolation=Isolation.MICROVM, detail="", reason="no /dev/kvm"
            ),
        ]
        self.restores = Restored.MEMORY
        self.missing: dict[str, list[str]] = {}
        """What of a paused one is not there when it is to be resumed."""
        self.labels: dict[str, dict[str, str] | None] = {}
        """Of paused ones, as they were told."""
        self.repaused_frozen: list[bool] = []
        """What comes back of what was saved."""
        self.ready = PoolFacts()
        self.begun_with: dict[str, tuple[str, bool]] = {}
        self.snapshots_kept: dict[str, SnapshotFacts] = {}
        self.errors: dict[str, CpuosError] = {}
        """Verb to the error with which it is refused, before it has done anything."""
        self.gates: defaultdict[str, Gate] = defaultdict(Gate)
        """Verb to the gate that its calls pass first."""
        self._news = asyncio.Condition()

    async def delete_pack(self, image: str) -> None:
        return

    async def storage(self) -> NodeStorage:
        volume = VolumeFacts(full=False, total_bytes=1 << 40, free_bytes=1 << 40, ballast_bytes=0)
        items = [
            StorageItem(kind=StorageKind.SNAPSHOT, name=one.id, real_bytes=one.size_bytes, apparent_bytes=1 << 30)
            for one in self.snapshots_kept.values()
        ]
        return NodeStorage(node="node-1", volume=volume, reflink=False, items=items)

    async def usage(self) -> list[SandboxUsage]:
        self._demand_reachable()
        self.calls["usage"] += 1
        return [
            SandboxUsage(id=one.id, generation=one.generation, **self.used[one.id].model_dump())
            for one in self.sandboxes.values()
            if one.alive and not one.paused and one.id in self.used
        ]

    async def prune(self, *, dry_run: bool) -> list[StorageItem]:
        return []

    async def facts(self) -> NodeFacts:
        self._demand_reachable()
        templates = [TemplateFacts(name=name, digest=f"sha256:{name}", size_bytes=1) for name in self.templates]
        templates += [TemplateFacts(name=name, digest="sha256:b", size_bytes=1, built=True) for name in self.built]
        return NodeFacts(
            node="node-1", version="0.1.0", boot_id="boot", runtimes=self.runtimes, templates=templates, **self.capacity
        )

    async def create(self, request: NodeSandboxCreate) -> SandboxFacts:
        self.calls["create"] += 1
        self._demand_reachable()
        await self.create_gate.wait()
        is_ready = request.id in {one.id for one in self.ready.ready}
        if request.ready and not is_ready and request.id not in self.sandboxes:
            raise Conflict(f"cannot create sandbox: {request.id} is not ready", code="sandbox_not_ready")
        if self.create_error is not None:
            raise self.create_error
        if self.fenced.get(request.id, 0) >= request.generation:
            raise Conflict("cannot create: deleted meanwhile", code="stale_generation")
        own = next(runtime for runtime in self.runtimes if runtime.name == request.runtime)
        facts = self.sandboxes.get(request.id) or SandboxFacts(
            id=request.id,
            generation=request.generation,
            alive=True,
            started_from=StartedFrom.POOL if is_ready else StartedFrom.COLD,
            runtime=request.runtime,
            isolation=own.isolation,
            isolation_detail=own.detail,
            template=request.template,
            template_digest=f"sha256:{request.template}",
            started_at=datetime.now(UTC),
        )
        if request.snapshot is not None:
            saved = self._snapshot(request.snapshot)
            self.begun_with[request.id] = (request.snapshot, request.warm)
            facts = facts.model_copy(update={"restored": self.restores, "restored_at": saved.created_at})
        self.sandboxes[request.id] = facts
        self.policies[request.id] = request.network
        await self._tell(facts)
        await self.answer_gate.wait()
        self._demand_reachable()
        return facts

    async def pool(self, after: int, *, wait_s: float = 25.0) -> PoolFacts:
        self._demand_reachable()
        if after == self.ready.seq:
            await asyncio.sleep(wait_s)
        return self.ready

    async def get(self, sandbox_id: str) -> SandboxFacts:
        self._demand_reachable()
        if sandbox_id not in self.sandboxes:
            raise NotFound(f"cannot find sandbox: {sandbox_id}", code="sandbox_not_found")
        return self.sandboxes[sandbox_id]

    async def list(self) -> list[SandboxFacts]:
        self._demand_reachable()
        return list(self.sandboxes.values())

    async def delete(self, sandbox_id: str, *, generation: int) -> None:
        self.calls["delete"] += 1
        self._demand_reachable()
        self.fenced[sandbox_id] = max(generation, self.fenced.get(sandbox_id, 0))
        facts = self.sandboxes.pop(sandbox_id, None)
        if facts is not None:
            await self._tell(facts.model_copy(update={"alive": False, "exit_reason": "deleted"}))

    async def update_network(self, sandbox_id: str, *, generation: int, policy: EffectivePolicy) -> None:
        self.calls["update_network"] += 1
        self._demand_reachable()
        if sandbox_id not in self.sandboxes:
            raise NotFound(f"cannot find sandbox: {sandbox_id}", code="sandbox_not_found")
        known = self.policies[sandbox_id].version
        if policy.version < known:
            raise Conflict(
                f"cannot change the network of sandbox: {sandbox_id}", code="stale_policy", details={"known": known}
            )
        self.policies[sandbox_id] = policy

    # --- pause and resume ---

    async def pause(
        self, sandbox_id: str, *, generation: int, freeze: str, labels: dict[str, str] | None = None
    ) -> SandboxFacts:
        facts = await self._called("pause", sandbox_id, generation)
        self.labels[sandbox_id] = labels
        return self._set(facts, paused=True, settled=True)

    async def resume(
        self,
        sandbox_id: str,
        *,
        generation: int,
        network: EffectivePolicy,
        labels: dict[str, str] | None = None,
        incomplete: bool = False,
    ) -> SandboxFacts:
        facts = await self._called("resume", sandbox_id, generation)
        missing = self.missing.get(sandbox_id, []) if facts.paused else []
        kept = self.labels.get(sandbox_id)
        if facts.paused and None not in (labels, kept) and labels != kept:
            missing = [*missing, "the labels as they were"]
        if missing and not incomplete:
            raise Conflict("cannot resume: not all is there", code="restore_incomplete", details={"missing": missing})
        if network.version > self.policies[sandbox_id].version:
            self.policies[sandbox_id] = network
        if not facts.paused:
            return facts
        count = facts.incarnation + 1
        return self._set(facts, paused=False, settled=False, incarnation=count, restored=self.restores, missing=missing)

    async def settle(self, sandbox_id: str, *, generation: int) -> None:
        self._set(await self._called("settle", sandbox_id, generation), settled=True)

    async def repause(self, sandbox_id: str, *, generation: int, frozen: bool = False) -> SandboxFacts:
        facts = await self._called("repause", sandbox_id, generation)
        self.repaused_frozen.append(frozen)
        if not facts.paused and facts.settled:
            raise Conflict("cannot repause: its image is gone", code="wrong_state")
        return self._set(facts, paused=True, settled=True)

    async def snapshot(
        self, sandbox_id: str, *, generation: int, snapshot: str, freeze: str | None = None, memory: bool = True
    ) -> SnapshotFacts:
        facts = await self._called("snapshot", sandbox_id, generation, dead=not memory)
        if facts.alive and not facts.paused and freeze is None:
            raise Conflict("cannot make a snapshot: it runs and is not frozen", code="wrong_state")
        self.snapshots_kept[snapshot] = SnapshotFacts(
            id=snapshot,
            sandbox=sandbox_id,
            generation=generation,
            incarnation=facts.incarnation,
            memory=memory,
            root=False,
            size_bytes=1 << 20,
            template=facts.template,
            template_digest=facts.template_digest,
            runtime=facts.runtime,
            runtime_version="1",
            cpu=2,
            memory_mib=2048,
            disk_mib=8192,
            max_processes=512,
            created_at=datetime.now(UTC),
        )
        await self.gates["snapshot answer"].passed()
        self._demand_reachable()
        return self.snapshots_kept[snapshot]

    async def snapshots(self) -> list[SnapshotFacts]:
        self._demand_reachable()
        return list(self.snapshots_kept.values())

    async def delete_snapshot(self, snapshot: str) -> None:
        self.calls["delete_snapshot"] += 1
        self._demand_reachable()
        if error := self.errors.get("delete_snapshot"):
            raise error
        self.snapshots_kept.pop(snapshot, None)

    async def _called(self, verb: str, sandbox_id: str, generation: int, *, dead: bool = False) -> SandboxFacts:
        self.calls[verb] += 1
        self._demand_reachable()
        await self.gates[verb].passed()
        if error := self.errors.get(verb):
            raise error
        facts = self.sandboxes.get(sandbox_id)
        if facts is None:
            raise NotFound(f"cannot find sandbox: {sandbox_id}", code="sandbox_not_found")
        if facts.generation != generation:
            raise Conflict("cannot do it: another generation", code="stale_generation")
        if not facts.alive and not dead:
            raise SandboxGone(f"cannot {verb}: it is dead", facts.exit_reason)
        return facts

    def _set(self, facts: SandboxFacts, **changes: Any) -> SandboxFacts:
        self.sandboxes[facts.id] = facts.model_copy(update=changes)
        return self.sandboxes[facts.id]

    def _snapshot(self, snapshot: str) -> SnapshotFacts:
        if snapshot not in self.snapshots_kept:
            raise NotFound(f"cannot find snapshot: {snapshot}", code="snapshot_not_found")
        return self.snapshots_kept[snapshot]

    async def put_template(self, image: str, *, size: int, sha256: str, content: AsyncIterator[bytes]) -> None:
        self._demand_reachable()
        self.built[image] = b"".join([piece async for piece in content])

    async def delete_template(self, image: str) -> None:
        self._demand_reachable()
        self.built.pop(image, None)

    async def stats(self, sandbox_id: str) -> SandboxStats:
        self._demand_reachable()
        return SandboxStats(id=sandbox_id, memory_bytes=1, cpu_seconds=0, processes=1, disk_used_bytes=0)

    async def changes(self, after: int, *, wait_s: float = 25.0) -> Changes:
        self._demand_reachable()
        if after == 0:
            return Changes(seq=max(1, len(self.log)), changes=list(self.sandboxes.values()))
        async with self._news:
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait_for(lambda: len(self.log) > after)
            except TimeoutError:
                pass
        self._demand_reachable()
        return Changes(seq=max(after, len(self.log)), changes=self.log[after:])

    async def aclose(self) -> None:
        return None

    async def die(self, sandbox_id: str, reason: str = "killed by the kernel: out of memory") -> None:
        dead = self.sandboxes[sandbox_id].model_copy(update={"alive": False, "exit_reason": reason})
        self.sandboxes[sandbox_id] = dead
        await self._tell(dead)

    async def _tell(self, facts: SandboxFacts) -> None:
        async with self._news:
            self.log.append(facts)
            self._news.notify_all()

    def _demand_reachable(self) -> None:
        if not self.reachable:
            raise Unavailable("cannot reach the node daemon", "it is down", code="node_unavailable")


class FakeGateway:
    """Remembers what it was told, and serves a journal."""

    def __init__(self) -> None:
        self.attached: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.reachable = True
        self.attach_error: CpuosError | None = None
        self.attach_gate = asyncio.Event()
        self.attach_gate.set()
        self.source = "gateway-1"
        self.entries: list[dict[str, Any]] = []
        self.ports: dict[tuple[str, int], dict[str, Any]] = {}
        self.suspended: dict[str, dict[str, Any]] = {}
        self.suspend_error: CpuosError | None = None
        self.suspend_gate = Gate()
        self.missing: dict[str, list[str]] = {}
        """What of a suspended one is gone when it is to go on."""
        self.told: dict[str, Suspended] = {}
        """What sandboxes tell of themselves when they are frozen."""
        self.idle_since: dict[str, float | None] = {}
        """None: it is busy."""
        self.wakes_source = "gateway-process-1"
        self.called: list[str] = []
        self._wake_news = asyncio.Condition()

    async def attach(
        self,
        sandbox_id: str,
        *,
        generation: int,
        hostname: str,
        wait_s: float,
        starting_s: float = 0.0,
        incomplete: bool = False,
    ) -> list[str]:
        self._demand_reachable()
        await self.attach_gate.wait()
        if self.attach_error is not None:
            raise self.attach_error
        missing = self.missing.get(sandbox_id, []) if sandbox_id in self.suspended else []
        if missing and not incomplete:
            raise Conflict("cannot attach: not all came back", code="restore_incomplete", details={"missing": missing})
        self.attached[sandbox_id] = generation
        self.suspended.pop(sandbox_id, None)
        return missing

    async def suspend(
        self, sandbox_id: str, *, freeze: str, if_idle_since: float | None = None, auto_resume: bool = True
    ) -> Suspended:
        self._demand_reachable()
        await self.suspend_gate.passed()
        if self.suspend_error is not None:
            raise self.suspend_error
        idle = self.idle_since.get(sandbox_id, 0.0)
        if if_idle_since is not None and (idle is None or idle > if_idle_since):
            raise Conflict("cannot suspend: it is busy", code="sandbox_busy")
        self.suspended[sandbox_id] = {"freeze": freeze, "auto_resume": auto_resume}
        return self.told.get(sandbox_id, Suspended(processes=1, listeners=[], commands=[]))

    async def activity(self) -> dict[str, SandboxActivity]:
        self._demand_reachable()
        return {
            one: SandboxActivity(
                busy=self.idle_since.get(one, 0.0) is None,
                idle_since=None if one in self.suspended else self.idle_since.get(one, 0.0),
                suspended=one in self.suspended,
            )
            for one in self.attached
        }

    async def wakes(self, after: int, *, wait_s: float = 25.0) -> WakesPage:
        self._demand_reachable()
        async with self._wake_news:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake_news.wait_for(lambda: len(self.called) > after)
        wakes = [Wake(seq=seq, sandbox=one) for seq, one in enumerate(self.called, 1) if seq > after]
        return WakesPage(source=self.wakes_source, wakes=wakes, next=len(self.called))

    async def call(self, sandbox_id: str) -> None:
        """Somebody calls a suspended sandbox, and waits."""
        async with self._wake_news:
            self.called.append(sandbox_id)
            self._wake_news.notify_all()

    async def detach(
        self, sandbox_id: str, *, reason: str, text: str, generation: int, session_s: float | None = None
    ) -> None:
        self._demand_reachable()
        if generation < self.attached.get(sandbox_id, 0):
            return
        self.suspended.pop(sandbox_id, None)
        if self.attached.pop(sandbox_id, None) is not None:
            self.ended[sandbox_id] = reason

    async def forget(self, sandbox_id: str, *, generation: int) -> None:
        self._demand_reachable()
        if generation < self.attached.get(sandbox_id, 0):
            return
        self.forgotten.add(sandbox_id)

    async def journal(self, after: int, *, limit: int) -> JournalPage:
        self._demand_reachable()
        entries = [entry for entry in self.entries if entry["seq"] > after][:limit]
        return JournalPage(source=self.source, entries=entries, next=entries[-1]["seq"] if entries else after)

    async def open_port(self, sandbox_id: str, *, port: int, **told: Any) -> None:
        self._demand_reachable()
        self.ports[sandbox_id, port] = told

    async def close_port(self, sandbox_id: str, *, port: int, epoch: int) -> None:
        self._demand_reachable()
        self.ports.pop((sandbox_id, port), None)

    async def revoke(self, **which: str) -> None:
        self._demand_reachable()

    async def health(self) -> None:
        self._demand_reachable()

    async def aclose(self) -> None:
        return None

    def _demand_reachable(self) -> None:
        if not self.reachable:
            raise Unavailable("cannot reach the gateway", "it is down", code="gateway_unavailable")


class FakeRecords:
    """A records worker's journal."""

    def __init__(self) -> None:
        self.source = "records-1"
        self.entries: list[dict[str, Any]] = []

    async def page(self, after: int, *, limit: int) -> RecordsPage:
        entries = [entry for entry in self.entries if entry["seq"] > after][:limit]
        return RecordsPage(source=self.source, entries=entries, next=entries[-1]["seq"] if entries else after)

    async def aclose(self) -> None:
        return None


@functools.cache
def served_routes() -> Any:
    """Made once: that takes longer than most tests."""
    return create_routes()


@dataclass(kw_only=True)
class Installation:
    """What outlives the server: its database and keys, the node, the gateway."""

    folder: Path
    node: FakeNode = field(default_factory=FakeNode)
    gateway: FakeGateway = field(default_factory=FakeGateway)
    records: FakeRecords = field(default_factory=FakeRecords)
    clock: ManualClock = field(default_factory=ManualClock)
    key: str = ""

    @asynccontextmanager
    async def serve(self, *, reconcile: bool = False, **options: Any) -> AsyncIterator[Server]:
        """One run of the server. Leaving the block ends it."""
        chosen = {"stop_grace_s": 5.0, **options}
        described = ServerOptions(
            database_url=f"sqlite+aiosqlite:///{self.folder / 'cpuos.db'}",
            ticket_key=self.folder / "ticket.key",
            data_url=lambda: "http://127.0.0.1:7071",
            preview_url=lambda: "http://preview.localhost:7072",
            **chosen,
        )
        opened = open_control_plane(
            described,
            node=self.node,
            gateway=self.gateway,
            records=self.records,
            clock=self.clock,
            reconcile=reconcile,
        )
        async with opened as plane:
            self.key = await make_first_key(plane.database, self.clock) or self.key
            transport = httpx2.ASGITransport(app=create_app(plane, routes=served_routes()))
            headers = {"authorization": f"Bearer {self.key}"}
            async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
                yield Server(plane=plane, http=http, installation=self)


@dataclass(kw_only=True)
class Server:
    plane: ControlPlane
    http: httpx2.AsyncClient
    installation: Installation

    async def create(self, *, key: str | None = None, **body: Any) -> httpx2.Response:
        headers = {"idempotency-key": key} if key else {}
        return await self.http.post("/v1/sandboxes", json=body, headers=headers)

    async def created(self, **body: Any) -> dict[str, Any]:
        answer = await self.create(**body)
        assert answer.status_code == 201, answer.text
        return answer.json()["sandbox"]

    async def get(self, ref: str) -> dict[str, Any]:
        answer = await self.http.get(f"/v1/sandboxes/{ref}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def kill(self, ref: str) -> httpx2.Response:
        return await self.http.delete(f"/v1/sandboxes/{ref}")

    async def node_called(self, *, answering: bool = False) -> None:
        """Wait until a create has come to the node; with `answering`, until only its answer is lacking."""
        node = self.installation.node

        await until(lambda: node.sandboxes if answering else node.calls["create"])

    async def settle(self) -> None:
        """Let the reconciler do all it has to do."""
        reconciler = self.plane.reconciler
        for step in (reconciler.sweep, reconciler.tick, reconciler.tell_networks):
            with suppress(CpuosError, OSError):  # its loop would say so and go on
                await step()
            await self.plane.tasks.shared_ended()


async def check_nothing_is_left(server: Server) -> None:
    """Records, node, gateway, promises and open work agree."""
    records = (await server.http.get("/v1/sandboxes?state=all")).json()["sandboxes"]
    running = {one["id"] for one in records if one["state"] == "running"}
    paused = {one["id"] for one in records if one["state"] == "paused"}
    assert {one["state"] for one in records} <= {"running", "paused", "stopped", "failed", "lost"}
    assert all(one["reason"] and one["ended_at"] for one in records if one["id"] not in running | paused)
    node, gateway = server.installation.node, server.installation.gateway
    assert set(node.sandboxes) == running | paused
    assert all(facts.alive and facts.settled for facts in node.sandboxes.values())
    assert {facts.id for facts in node.sandboxes.values() if facts.paused} == paused
    assert set(gateway.attached) == running | paused
    assert set(gateway.suspended) == paused
    kept = {one["id"]: one["state"] for one in (await server.http.get("/v1/snapshots")).json()["snapshots"]}
    assert set(kept.values()) <= {"ready", "failed"}
    assert set(node.snapshots_kept) == {one for one, state in kept.items() if state == "ready"}
    reserved = {name: one["reserved"] for name, one in (await server.http.get("/v1/capacity")).json().items()}
    assert reserved["sandboxes"] == len(running)
    for name, holders in (("memory_mib", running), ("cpu", running), ("disk_mib", running | paused)):
        assert reserved[name] == sum(one[name] for one in records if one["id"] in holders)
    database = server.installation.folder / "cpuos.db"
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM open_intents").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM idempotency WHERE status IS NULL").fetchone() == (0,)
        uneven = "SELECT count(*) FROM audit GROUP BY coalesce(intent_id, id) HAVING count(*) > 2"
        assert connection.execute(uneven).fetchall() == []
        unanswered = (
            "SELECT count(*) FROM audit a WHERE phase = 'intent' AND source IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM audit o WHERE o.intent_id = a.id)"
        )
        assert connection.execute(unanswered).fetchone() == (0,)


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    return answer.json()["error"]
