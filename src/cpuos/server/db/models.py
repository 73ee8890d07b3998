"""Tables. Migrations in `migrations/` make them; a test holds the two equal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, Index, MetaData, String, TypeDecorator, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = [
    "ApiKey",
    "AuditRow",
    "Base",
    "BuildRow",
    "ConnectionRow",
    "IdempotencyRow",
    "JournalCursor",
    "LayerRow",
    "OpenIntent",
    "PackRow",
    "PortRow",
    "SandboxRow",
    "ServerStart",
    "SnapshotRow",
    "TemplateRow",
    "UtcDateTime",
    "Workspace",
]

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
LIVE = text("state NOT IN ('stopped', 'failed', 'lost')")
KEPT = text("state IN ('creating', 'ready')")


class UtcDateTime(TypeDecorator[datetime]):
    """A moment: only values with a time zone go in, UTC comes out, on every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"cannot store {value!r}: it has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {datetime: UtcDateTime(), dict[str, Any]: JSON(), list[str]: JSON()}  # noqa: RUF012


class Workspace(Base):
    __tablename__ = "workspaces"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), unique=True)
    max_sandboxes: Mapped[int | None]
    """Live sandboxes it may have; None: as many as the nodes hold."""
    max_snapshots: Mapped[int | None]
    """Snapshots it may keep; None: as many as the nodes hold."""
    network: Mapped[dict[str, Any]] = mapped_column(default=lambda: {"mode": "internet"})
    """`NetworkPolicy` that holds for each of its sandboxes beside the sandbox's own."""
    alarms: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list, server_default="[]")
    """Each `AlarmRule` that holds for each of its sandboxes beside the sandbox's own."""
    created_at: Mapped[datetime]


class ApiKey(Base):
    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    """The part of the key after `cpk_`; no secret."""
    workspace: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    name: Mapped[str] = mapped_column(String(128))
    secret_hash: Mapped[str] = mapped_column(String(64))
    """SHA-256 of the whole key, in hex. The key has 256 random bits, so a slow hash would add nothing."""
    permissions: Mapped[list[str]]
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class SandboxRow(Base):
    __tablename__ = "sandboxes"
    __table_args__ = (
        Index("ix_sandboxes_live_name", "workspace", "name", unique=True, sqlite_where=LIVE, postgresql_where=LIVE),
        Index("ix_sandboxes_workspace_created_at", "workspace", "created_at"),
        Index("ix_sandboxes_state", "state"),
        Index("ix_sandboxes_intent", "intent"),
        Index(
            "ix_sandboxes_gateway_stage",
            "gateway_stage",
            sqlite_where=text("gateway_stage != 'forgotten'"),
            postgresql_where=text("gateway_stage != 'forgotten'"),
        ),
    )

    id: Mapped[str] = mapped_column(String(20), primary_key=True)
    workspace: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    name: Mapped[str | None] = mapped_column(String(63))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(default="")
    generation: Mapped[int] = mapped_column(default=1)
    template: Mapped[str] = mapped_column(String(63))
    template_digest: Mapped[str] = mapped_column(default="")
    image: Mapped[str | None] = mapped_column(String(63))
    """How the node calls the template's image, where that is not the template's name: see `TemplateRow`."""
    runtime: Mapped[str] = mapped_column(String(16))
    isolation: Mapped[str] = mapped_column(String(16))
    isolation_detail: Mapped[str]
    node: Mapped[str] = mapped_column(String(63))
    cpu: Mapped[int]
    memory_mib: Mapped[int]
    disk_mib: Mapped[int]
    max_processes: Mapped[int]
    timeout_s: Mapped[float]
    on_timeout: Mapped[str] = mapped_column(String(8), default="kill")
    idle_timeout_s: Mapped[float | None]
    on_idle: Mapped[str] = mapped_column(String(8), default="pause")
    auto_resume: Mapped[bool] = mapped_column(default=True)
    snapshot: Mapped[str | None] = mapped_column(String(20))
    """What it began with."""
    started_from: Mapped[str | None] = mapped_column(String(8))
    labels: Mapped[dict[str, Any]]
    packs: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    """`AttachedPack` of each, by where it lies."""
    task: Mapped[str | None] = mapped_column(String(128))
    network: Mapped[dict[str, Any]]
    """Its own `NetworkPolicy`."""
    network_version: Mapped[int] = mapped_column(default=1)
    """Of its own policy and its workspace's together: rises with each change of either."""
    network_applied: Mapped[int] = mapped_column(default=1)
    """The version that the node has put in place."""
    alarms: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list, server_default="[]")
    """Each `AlarmRule` of its own."""
    active_alarms: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list, server_default="[]")
    """`Episode` of each that goes on."""
    created_by: Mapped[str] = mapped_column(String(63))
    intent: Mapped[int | None]
    """Audit id of the create's intent: ties the row to its request across a restart."""
    failure: Mapped[dict[str, Any] | None]
    """The error of the create that failed, as its caller saw it."""
    gateway_stage: Mapped[str] = mapped_column(String(16), default="attached")
    """attached → detached → forgotten: what the gateway has been told."""
    created_at: Mapped[datetime]
    changed_at: Mapped[datetime]
    """When `state` changed last."""
    deadline_at: Mapped[datetime | None]
    """By when a transitional state must have ended."""
    started_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    """None while it is paused."""
    paused_at: Mapped[datetime | None]
    left_s: Mapped[float | None]
    """The session time that a paused one has left."""
    ended_at: Mapped[datetime | None]
    lost_at: Mapped[datetime | None]
    """When it was found to be lost, with the reason; until it runs again."""
    lost_reason: Mapped[str | None]
    recreated: Mapped[dict[str, Any] | None]
    """`Recreated`: what it began with when it was made anew."""
    resumed_from: Mapped[str | None] = mapped_column(String(8))
    restore_incomplete: Mapped[list[str] | None]
    receipt: Mapped[dict[str, Any] | None]
    """`Receipt` of its last pause."""
    root_checkpoint_interval_s: Mapped[float | None]


class SnapshotRow(Base):
    """Gone when its node has removed it."""

    __tablename__ = "snapshots"
    __table_args__ = (
        Index("ix_snapshots_name", "workspace", "name", unique=True, sqlite_where=KEPT, postgresql_where=KEPT),
        Index("ix_snapshots_workspace_created_at", "workspace", "created_at"),
        Index("ix_snapshots_intent", "intent"),
    )

    id: Mapped[str] = mapped_column(String(20), primary_key=True)
    workspace: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    name: Mapped[str | None] = mapped_column(String(63))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(default="")
    internal: Mapped[bool] = mapped_column(default=False)
    """Made for a fork alone: nobody sees it, and it goes when the fork has ended."""
    sandbox: Mapped[str] = mapped_column(ForeignKey("sandboxes.id"))
    memory: Mapped[bool]
    size_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    template: Mapped[str] = mapped_column(String(63))
    image: Mapped[str | None] = mapped_column(String(63))
    template_digest: Mapped[str] = mapped_column(default="")
    runtime: Mapped[str] = mapped_column(String(16))
    node: Mapped[str] = mapped_column(String(63))
    cpu: Mapped[int]
    memory_mib: Mapped[int]
    disk_mib: Mapped[int]
    max_processes: Mapped[int]
    labels: Mapped[dict[str, Any]]
    packs: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    """`AttachedPack` of each, by where it lies."""
    network: Mapped[dict[str, Any]]
    alarms: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list, server_default="[]")
    created_by: Mapped[str] = mapped_column(String(63))
    intent: Mapped[int | None]
    created_at: Mapped[datetime]
    changed_at: Mapped[datetime]


class AuditRow(Base):
    """Only ever inserted."""

    __tablename__ = "audit"
    __table_args__ = (
        Index("ix_audit_source_seq", "source", "source_seq", unique=True),
        Index("ix_audit_workspace_sandbox", "workspace", "sandbox", "id"),
        Index("ix_audit_workspace_action", "workspace", "action", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    workspace: Mapped[str] = mapped_column(String(32))
    actor: Mapped[str] = mapped_column(String(63))
    action: Mapped[str] = mapped_column(String(63))
    target: Mapped[str]
    sandbox: Mapped[str | None] = mapped_column(String(20))
    phase: Mapped[str] = mapped_column(String(8))
    intent_id: Mapped[int | None] = mapped_column(index=True)
    result: Mapped[str | None] = mapped_column(String(8))
    detail: Mapped[dict[str, Any]]
    source: Mapped[str | None] = mapped_column(String(63))
    """Which gateway told it; None: the server itself."""
    source_seq: Mapped[int | None]


class ConnectionRow(Base):
    """Outbound connections as the node's records worker saw them: inserted once, completed when they end."""

    __tablename__ = "connections"
    __table_args__ = (
        Index("ix_connections_source_connection", "source", "connection", unique=True),
        Index("ix_connections_workspace_sandbox", "workspace", "sandbox", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    workspace: Mapped[str] = mapped_column(String(32))
    sandbox: Mapped[str] = mapped_column(String(20))
    command: Mapped[str | None] = mapped_column(String(16))
    kind: Mapped[str] = mapped_column(String(8))
    name: Mapped[str | None] = mapped_column(String(253))
    address: Mapped[str | None] = mapped_column(String(15))
    port: Mapped[int | None]
    verdict: Mapped[str] = mapped_column(String(8))
    rule: Mapped[str]
    count: Mapped[int] = mapped_column(default=1)
    bytes_sent: Mapped[int | None] = mapped_column(BigInteger)
    bytes_received: Mapped[int | None] = mapped_column(BigInteger)
    ended_at: Mapped[datetime | None]
    source: Mapped[str] = mapped_column(String(63))
    """Which records worker told it."""
    connection: Mapped[int]
    """Its number there."""


class OpenIntent(Base):
    """Intents without outcome; what an earlier start of the server left here is settled by the reconciler."""

    __tablename__ = "open_intents"

    id: Mapped[int] = mapped_column(ForeignKey("audit.id"), primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    deadline_at: Mapped[datetime]


class PortRow(Base):
    """A port that was published; a closed one keeps its row, and with it the epoch that its tokens have."""

    __tablename__ = "ports"

    sandbox: Mapped[str] = mapped_column(ForeignKey("sandboxes.id"), primary_key=True)
    port: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    """Goes up each time that it is published after it was closed."""
    public: Mapped[bool]
    public_until: Mapped[datetime | None]
    host: Mapped[str | None] = mapped_column(String(16))
    created_by: Mapped[str] = mapped_column(String(63))
    created_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]


class IdempotencyRow(Base):
    __tablename__ = "idempotency"
    __table_args__ = (Index("ix_idempotency_created_at", "created_at"), Index("ix_idempotency_intent", "intent"))

    workspace: Mapped[str] = mapped_column(ForeignKey("workspaces.id"), primary_key=True)
    route: Mapped[str] = mapped_column(String(128), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    intent: Mapped[int]
    status: Mapped[int | None]
    """HTTP status of the answer; None while the first call has not ended."""
    answer: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime]


class JournalCursor(Base):
    __tablename__ = "journal_cursors"

    source: Mapped[str] = mapped_column(String(63), primary_key=True)
    """The instance id of a gateway, or of a records worker."""
    next_seq: Mapped[int]


class ServerStart(Base):
    """One row a start of the server; its id is the epoch that marks what an earlier process left open."""

    __tablename__ = "server_starts"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    version: Mapped[str] = mapped_column(String(32))


class TemplateRow(Base):
    """A name for the image of a build; several may name one image. Installed templates have no row."""

    __tablename__ = "templates"
    __table_args__ = (Index("ix_templates_workspace_key", "workspace", "key"),)

    workspace: Mapped[str] = mapped_column(ForeignKey("workspaces.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    image: Mapped[str] = mapped_column(String(63))
    """The node's name of it."""
    key: Mapped[str] = mapped_column(String(64))
    """Of all that went into the build."""
    manifest: Mapped[dict[str, Any]]
    """`TemplateInfo`."""


class PackRow(Base):
    """A name for a data pack on a node."""

    __tablename__ = "packs"

    workspace: Mapped[str] = mapped_column(ForeignKey("workspaces.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    image: Mapped[str] = mapped_column(String(63))
    """The node's name of it, given once."""
    node: Mapped[str] = mapped_column(String(63))
    digest: Mapped[str] = mapped_column(String(80))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    files: Mapped[int]
    created_at: Mapped[datetime]
    created_by: Mapped[str] = mapped_column(String(63))


class LayerRow(Base):
    """What the steps of a build have left, for later ones: an internal snapshot that the next may begin with."""

    __tablename__ = "build_layers"

    workspace: Mapped[str] = mapped_column(ForeignKey("workspaces.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Of all that went into the steps."""
    snapshot: Mapped[str] = mapped_column(String(20))
    parent_digest: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[datetime]
    used_at: Mapped[datetime]


class BuildRow(Base):
    __tablename__ = "builds"
    __table_args__ = (Index("ix_builds_state", "state"),)

    id: Mapped[str] = mapped_column(String(20), primary_key=True)
    workspace: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    sandbox: Mapped[str | None] = mapped_column(String(20))
    state: Mapped[str] = mapped_column(String(16))
    build: Mapped[dict[str, Any]]
    """`Build`, as last told."""
    created_at: Mapped[datetime]
