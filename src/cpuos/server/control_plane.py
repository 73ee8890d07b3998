"""All parts of the server, wired; opened by `async with`, whatever serves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Row, insert

from cpuos.errors import CpuosError, Unavailable
from cpuos.node.client import NodeClient
from cpuos.scheduler.base import CapacityRules, Scheduler
from cpuos.scheduler.local import LocalScheduler
from cpuos.server.alarm_actions import AlarmActions
from cpuos.server.alarms import Alarms, current_alarms
from cpuos.server.asks import amount_of
from cpuos.server.audit import Audit
from cpuos.server.auth import Authenticator
from cpuos.server.clock import Clock, utc_now
from cpuos.server.connections import ConnectionIngest, ConnectionRecords
from cpuos.server.db.database import Database
from cpuos.server.db.migrate import upgrade_database
from cpuos.server.db.models import ServerStart
from cpuos.server.db.sandboxes import live_rows
from cpuos.server.envelope import VERSION
from cpuos.server.gateway import GatewayControl
from cpuos.server.guard import Guard
from cpuos.server.idempotency import Idempotency
from cpuos.server.journal import JournalIngest
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.network import Networks
from cpuos.server.packs import PackRules, Packs
from cpuos.server.pausing import Pausing
from cpuos.server.policies import AllowAll, Policy
from cpuos.server.quotas import Quotas
from cpuos.server.ready import ReadySandboxes
from cpuos.server.reconciler import Reconciler
from cpuos.server.recreating import Recreating
from cpuos.server.relief import Relief
from cpuos.server.retention import Retention, RetentionRules
from cpuos.server.settlement import Settlement
from cpuos.server.snapshots import Snapshots
from cpuos.server.storage import Stores
from cpuos.server.tasks import Tasks
from cpuos.server.templates.builder import Builder
from cpuos.server.templates.guest import Gate
from cpuos.server.templates.layers import Layers
from cpuos.server.templates.names import TemplateNames
from cpuos.server.tickets import TicketSigner, load_ticket_key
from cpuos.server.usage_alarms import UsageAlarms
from cpuos.server.wakes import Wakes
from cpuos.types.alarms import AlarmRule
from cpuos.types.blocked import Exemption
from cpuos.types.installation import Health, PartHealth
from cpuos.types.sandbox import LIVE_STATES, Access, Sandbox, SandboxState

__all__ = ["ControlPlane", "ServerOptions", "open_control_plane"]

_log = structlog.get_logger("cpuos.server")
# Health is asked often (each `cpuos status`, each probe) and needs no key: the parts are asked this often at most.
HEALTH_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the server needs to know of its installation."""

    database_url: str
    ticket_key: Path
    data_url: Callable[[], str | None]
    """URL of the gateway as clients see it; None while it has published none."""
    preview_url: Callable[[], str | None] = lambda: None
    """URL of the preview domain as visitors see it: the names of previews stand before its host."""
    inner_data_url: Callable[[], str | None] = lambda: None
    """URL of the gateway as the server itself reaches it; None: as clients do."""
    template_max_mib: int = 8192
    workspace_templates_mib: int = 65536
    workspace_layers_mib: int = 8192
    packs: PackRules = field(default_factory=PackRules)
    capacity: CapacityRules = field(default_factory=CapacityRules)
    create_deadline_s: float = 120.0
    """A sandbox that is not running by then is failed."""
    agent_wait_s: float = 30.0
    """How long the agent of a sandbox whose process runs may take to answer."""
    resume_wait_s: float = 5.0
    """The same after a resume; asked twice before the sandbox is paused again."""
    outcome_deadline_s: float = 600.0
    """An audit intent without outcome is `unknown` after this."""
    idempotency_wait_s: float = 90.0
    pressure_idle_s: float = 30.0
    """Sandboxes that were idle for so long are paused where their node is short of memory."""
    alarms: tuple[AlarmRule, ...] = ()
    """The operator's, for all workspaces."""
    alarm_interval_s: float = 10.0
    record_retention_s: float = 86400.0
    """What the commands of an ended sandbox left stays readable this long."""
    connection_records: int = 50_000
    """Connections recorded of one sandbox; those beyond are counted."""
    connection_retention_s: float = 30 * 86400.0
    retention: RetentionRules = field(default_factory=RetentionRules)
    network_exceptions: tuple[Exemption, ...] = ()
    """What the operator has opened of what is always blocked."""
    stop_grace_s: float = 2.0
    """How long a stopping server waits for work whose callers it has let go."""


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    options: ServerOptions
    clock: Clock
    database: Database
    scheduler: Scheduler
    gateway: GatewayControl
    tickets: TicketSigner
    lifecycle: Lifecycle
    pausing: Pausing
    snapshots: Snapshots
    recreating: Recreating
    networks: Networks
    usage_alarms: UsageAlarms
    templates: TemplateNames
    packs: Packs
    builder: Builder
    stores: Stores
    reconciler: Reconciler
    guard: Guard
    tasks: Tasks
    health_cache: dict[str, Any] = field(default_factory=dict)

    def data_url(self) -> str:
        url = self.options.data_url()
        if url is None:
            raise Unavailable(
                "cannot say where the gateway is",
                "it has not published its address since it started",
                code="gateway_unavailable",
                hint="cpuos status",
            )
        return url

    def preview_url(self, sandbox_id: str, port: int) -> str:
        """Where visitors find a port of a sandbox."""
        url = self.options.preview_url()
        if url is None:
            raise Unavailable(
                "cannot say where previews are",
                "the gateway has not published their address since it started",
                code="gateway_unavailable",
                hint="cpuos status",
            )
        scheme, _, place = url.rstrip("/").partition("://")
        return f"{scheme}://{port}-{sandbox_id}.{place}/"

    def access(self, sandbox: Row[Any] | Sandbox, *, actor: str) -> Access:
        """A fresh ticket for a sandbox; for one that has ended it grants no more than to read its record."""
        ended = SandboxState(sandbox.state) not in LIVE_STATES
        return self.tickets.access(
            data_url=self.data_url(),
            workspace=sandbox.workspace,
            sandbox=sandbox.id,
            generation=sandbox.generation,
            actor=actor,
            task=sandbox.task,
            scope=("records",) if ended else ("exec", "files"),
        )

    async def refresh_nodes(self) -> bool:
        """Fresh facts if they can be had; says whether."""
        try:
            await self.scheduler.refresh()
        except CpuosError:
            return False
        return True

    async def take_connections(self) -> None:
        """What the node has recorded of connections so far, if it answers soon."""
        try:
            async with asyncio.timeout(2.0):
                await asyncio.shield(self.tasks.start(self.reconciler.ingest_connections()))
        except (CpuosError, TimeoutError) as error:
            _log.warning("records of connections not taken", error=str(error))

    async def take_journal(self) -> None:
        """What the gateway has written down so far, if it answers soon: so that a reader finds what was just done."""
        try:
            async with asyncio.timeout(2.0):
                await asyncio.shield(self.tasks.start(self.reconciler.ingest()))
        except (CpuosError, TimeoutError) as error:
            _log.warning("journal not taken", error=str(error))

    async def health(self) -> Health:
        cached = self.health_cache.get("health")
        if cached is not None and cached[0] > time.monotonic():
            return cached[1]
        node, gateway = await asyncio.gather(_ask(self.scheduler.refresh()), _ask(self.gateway.health()))
        parts = {"node": node, "gateway": gateway}
        fine = all(part.status == "ok" for part in parts.values())
        alarms = current_alarms(self.scheduler.nodes())
        health = Health(status="ok" if fine else "degraded", version=VERSION, parts=parts, alarms=alarms)
        self.health_cache["health"] = (time.monotonic() + HEALTH_S, health)
        return health


@asynccontextmanager
async def open_control_plane(
    options: ServerOptions,
    *,
    node: NodeClient,
    gateway: GatewayControl,
    records: ConnectionRecords,
    clock: Clock = utc_now,
    policy: Policy | None = None,
    reconcile: bool = True,
) -> AsyncIterator[ControlPlane]:
    """Bring the database up to date, take up the reservations on record, start the reconciler.

    `reconcile=False` leaves its steps to the caller (tests).
    """
    await asyncio.to_thread(upgrade_database, options.database_url)
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(Database(options.database_url))
        epoch = await _record_start(database, clock)
        tasks = Tasks()
        stack.push_async_callback(tasks.close, grace_s=options.stop_grace_s)
        plane = await _wire(
            options,
            database,
            epoch=epoch,
            tasks=tasks,
            node=node,
            gateway=gateway,
            records=records,
            clock=clock,
            policy=policy,
        )
        stack.push_async_callback(plane.builder.close)
        if reconcile:
            plane.builder.start()
            plane.reconciler.start()
            stack.push_async_callback(plane.reconciler.stop)
        yield plane


@dataclass(frozen=True, kw_only=True)
class _Verbs:
    lifecycle: Lifecycle
    pausing: Pausing
    snapshots: Snapshots
    recreating: Recreating
    templates: TemplateNames
    packs: Packs
    tickets: TicketSigner
    builder: Builder


async def _wire(
    options: ServerOptions,
    database: Database,
    *,
    epoch: int,
    tasks: Tasks,
    node: NodeClient,
    gateway: GatewayControl,
    records: ConnectionRecords,
    clock: Clock,
    policy: Policy | None,
) -> ControlPlane:
    scheduler = LocalScheduler(node, options.capacity)
    async with database.read() as connection:
        scheduler.adopt({row.id: (row.node, amount_of(row)) for row in await live_rows(connection)})
    audit = Audit(clock, epoch=epoch, deadline_s=options.outcome_deadline_s)
    idempotency, quotas, networks = Idempotency(clock), Quotas(), Networks(database, scheduler)
    shared: dict[str, Any] = {"audit": audit, "quotas": quotas, "tasks": tasks, "clock": clock}
    verbs = _verbs(options, database, scheduler=scheduler, gateway=gateway, networks=networks, **shared)
    ingest = _connections(options, database, records, clock)
    parts: dict[str, Any] = {"database": database, "scheduler": scheduler, "tasks": tasks, "clock": clock}
    usage_alarms = _usage_alarms(options, verbs, ingest, audit=audit, **parts)
    reconciler = Reconciler(
        database=database,
        scheduler=scheduler,
        lifecycle=verbs.lifecycle,
        pausing=verbs.pausing,
        ready=ReadySandboxes(database, scheduler=scheduler, gateway=gateway, lifecycle=verbs.lifecycle, tasks=tasks),
        wakes=Wakes(database=database, gateway=gateway, pausing=verbs.pausing, tasks=tasks, clock=clock),
        snapshots=verbs.snapshots,
        packs=verbs.packs,
        networks=networks,
        journal=JournalIngest(database, gateway),
        connections=ingest,
        usage_alarms=usage_alarms,
        alarm_interval_s=options.alarm_interval_s,
        relief=Relief(
            **parts,
            gateway=gateway,
            pausing=verbs.pausing,
            alarms=Alarms(database=database, scheduler=scheduler, audit=audit),
            idle_s=options.pressure_idle_s,
        ),
        settlement=Settlement(database=database, audit=audit, idempotency=idempotency, lifecycle=verbs.lifecycle),
        retention=Retention(database=database, audit=audit, clock=clock, rules=options.retention),
        tasks=tasks,
        clock=clock,
        record_retention_s=options.record_retention_s,
    )
    return ControlPlane(
        options=options,
        clock=clock,
        database=database,
        scheduler=scheduler,
        gateway=gateway,
        tickets=verbs.tickets,
        lifecycle=verbs.lifecycle,
        pausing=verbs.pausing,
        snapshots=verbs.snapshots,
        recreating=verbs.recreating,
        networks=networks,
        usage_alarms=usage_alarms,
        templates=verbs.templates,
        packs=verbs.packs,
        builder=verbs.builder,
        stores=_stores(scheduler, verbs, clock),
        reconciler=reconciler,
        guard=_guard(options, database, policy=policy, idempotency=idempotency, **shared),
        tasks=tasks,
    )


def _stores(scheduler: Scheduler, verbs: _Verbs, clock: Clock) -> Stores:
    builder = verbs.builder
    return Stores(scheduler=scheduler, snapshots=verbs.snapshots, builder=builder, layers=builder.layers, clock=clock)


def _usage_alarms(
    options: ServerOptions, verbs: _Verbs, connections: ConnectionIngest, *, audit: Audit, **parts: Any
) -> UsageAlarms:
    database, clock = parts["database"], parts["clock"]
    actions = AlarmActions(database, lifecycle=verbs.lifecycle, pausing=verbs.pausing, audit=audit, clock=clock)
    return UsageAlarms(**parts, connections=connections, actions=actions, audit=audit, installation=options.alarms)


def _verbs(
    options: ServerOptions,
    database: Database,
    *,
    scheduler: Scheduler,
    gateway: GatewayControl,
    networks: Networks,
    audit: Audit,
    quotas: Quotas,
    tasks: Tasks,
    clock: Clock,
) -> _Verbs:
    templates = TemplateNames(database, scheduler)
    tickets = TicketSigner(load_ticket_key(options.ticket_key), clock)
    gate = Gate(tickets, lambda: options.inner_data_url() or options.data_url() or "")
    packs = Packs(database=database, scheduler=scheduler, gate=gate, rules=options.packs, clock=clock)
    lifecycle = Lifecycle(
        database=database,
        scheduler=scheduler,
        gateway=gateway,
        networks=networks,
        templates=templates,
        packs=packs,
        audit=audit,
        quotas=quotas,
        tasks=tasks,
        clock=clock,
        create_deadline_s=options.create_deadline_s,
        agent_wait_s=options.agent_wait_s,
    )
    pausing = Pausing(
        database=database,
        scheduler=scheduler,
        gateway=gateway,
        networks=networks,
        lifecycle=lifecycle,
        audit=audit,
        tasks=tasks,
        clock=clock,
        wait_s=options.resume_wait_s,
    )
    parts: dict[str, Any] = {"database": database, "scheduler": scheduler, "lifecycle": lifecycle, "quotas": quotas}
    snapshots = Snapshots(**parts, pausing=pausing, tasks=tasks, clock=clock)
    recreating = Recreating(**parts, snapshots=snapshots, tasks=tasks, clock=clock)
    lifecycle.rescue_by(snapshots.rescue)
    common = {"scheduler": scheduler, "networks": networks, "tasks": tasks, "clock": clock}
    builder = _builder(
        options, database, lifecycle=lifecycle, names=templates, snapshots=snapshots, gate=gate, **common
    )
    return _Verbs(
        lifecycle=lifecycle,
        pausing=pausing,
        snapshots=snapshots,
        recreating=recreating,
        templates=templates,
        packs=packs,
        tickets=tickets,
        builder=builder,
    )


def _builder(
    options: ServerOptions,
    database: Database,
    *,
    lifecycle: Lifecycle,
    names: TemplateNames,
    snapshots: Snapshots,
    gate: Gate,
    **common: Any,
) -> Builder:
    layers = Layers(
        database=database, snapshots=snapshots, clock=common["clock"], workspace_mib=options.workspace_layers_mib
    )
    return Builder(
        database=database,
        lifecycle=lifecycle,
        names=names,
        layers=layers,
        gate=gate,
        max_mib=options.template_max_mib,
        workspace_mib=options.workspace_templates_mib,
        **common,
    )


def _guard(
    options: ServerOptions,
    database: Database,
    *,
    policy: Policy | None,
    quotas: Quotas,
    audit: Audit,
    idempotency: Idempotency,
    tasks: Tasks,
    clock: Clock,
) -> Guard:
    return Guard(
        database=database,
        authenticator=Authenticator(database),
        quotas=quotas,
        policy=policy or AllowAll(),
        audit=audit,
        idempotency=idempotency,
        tasks=tasks,
        clock=clock,
        wait_s=options.idempotency_wait_s,
    )


def _connections(
    options: ServerOptions, database: Database, records: ConnectionRecords, clock: Clock
) -> ConnectionIngest:
    most, kept_s = options.connection_records, options.connection_retention_s
    return ConnectionIngest(database, records, clock, most_of_a_sandbox=most, kept_s=kept_s)


async def _record_start(database: Database, clock: Clock) -> int:
    async with database.write() as connection:
        statement = insert(ServerStart).values(at=clock(), version=VERSION).returning(ServerStart.id)
        return (await connection.execute(statement)).scalar_one()


async def _ask(question: Any) -> PartHealth:
    try:
        async with asyncio.timeout(2.0):
            await question
    except CpuosError as error:
        return PartHealth(status="unavailable", reason=error.why or error.what)
    except TimeoutError:
        return PartHealth(status="unavailable", reason="no answer within 2 s")
    return PartHealth(status="ok")
