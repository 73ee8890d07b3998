"""The control plane of one machine"""

import sqlalchemy as sa
from alembic import op

from cpuos.server.db.models import UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("actor", sa.String(length=63), nullable=False),
        sa.Column("action", sa.String(length=63), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("sandbox", sa.String(length=20), nullable=True),
        sa.Column("phase", sa.String(length=8), nullable=False),
        sa.Column("intent_id", sa.Integer(), nullable=True),
        sa.Column("result", sa.String(length=8), nullable=True),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("source", sa.String(length=63), nullable=True),
        sa.Column("source_seq", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_intent_id"), ["intent_id"], unique=False)
        batch_op.create_index("ix_audit_source_seq", ["source", "source_seq"], unique=True)
        batch_op.create_index("ix_audit_workspace_action", ["workspace", "action", "id"], unique=False)
        batch_op.create_index("ix_audit_workspace_sandbox", ["workspace", "sandbox", "id"], unique=False)

    op.create_table(
        "journal_cursors",
        sa.Column("source", sa.String(length=63), nullable=False),
        sa.Column("next_seq", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("source", name=op.f("pk_journal_cursors")),
    )
    op.create_table(
        "server_starts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("version", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_server_starts")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "workspaces",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("max_sandboxes", sa.Integer(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workspaces")),
        sa.UniqueConstraint("name", name=op.f("uq_workspaces_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("permissions", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(["workspace"], ["workspaces.id"], name=op.f("fk_api_keys_workspace")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_table(
        "idempotency",
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("route", sa.String(length=128), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("intent", sa.Integer(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("answer", sa.JSON(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["workspace"], ["workspaces.id"], name=op.f("fk_idempotency_workspace")),
        sa.PrimaryKeyConstraint("workspace", "route", "key", name=op.f("pk_idempotency")),
    )
    with op.batch_alter_table("idempotency", schema=None) as batch_op:
        batch_op.create_index("ix_idempotency_created_at", ["created_at"], unique=False)
        batch_op.create_index("ix_idempotency_intent", ["intent"], unique=False)

    op.create_table(
        "open_intents",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("deadline_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["id"], ["audit.id"], name=op.f("fk_open_intents_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_open_intents")),
    )
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("template", sa.String(length=63), nullable=False),
        sa.Column("template_digest", sa.String(), nullable=False),
        sa.Column("runtime", sa.String(length=16), nullable=False),
        sa.Column("isolation", sa.String(length=16), nullable=False),
        sa.Column("isolation_detail", sa.String(), nullable=False),
        sa.Column("node", sa.String(length=63), nullable=False),
        sa.Column("cpu", sa.Integer(), nullable=False),
        sa.Column("memory_mib", sa.Integer(), nullable=False),
        sa.Column("disk_mib", sa.Integer(), nullable=False),
        sa.Column("max_processes", sa.Integer(), nullable=False),
        sa.Column("timeout_s", sa.Double(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("task", sa.String(length=128), nullable=True),
        sa.Column("created_by", sa.String(length=63), nullable=False),
        sa.Column("intent", sa.Integer(), nullable=True),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("gateway_stage", sa.String(length=16), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("changed_at", UtcDateTime(), nullable=False),
        sa.Column("deadline_at", UtcDateTime(), nullable=True),
        sa.Column("started_at", UtcDateTime(), nullable=True),
        sa.Column("expires_at", UtcDateTime(), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(["workspace"], ["workspaces.id"], name=op.f("fk_sandboxes_workspace")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sandboxes")),
    )
    with op.batch_alter_table("sandboxes", schema=None) as batch_op:
        batch_op.create_index(
            "ix_sandboxes_gateway_stage",
            ["gateway_stage"],
            unique=False,
            sqlite_where=sa.text("gateway_stage != 'forgotten'"),
            postgresql_where=sa.text("gateway_stage != 'forgotten'"),
        )
        batch_op.create_index("ix_sandboxes_intent", ["intent"], unique=False)
        batch_op.create_index(
            "ix_sandboxes_live_name",
            ["workspace", "name"],
            unique=True,
            sqlite_where=sa.text("state NOT IN ('stopped', 'failed', 'lost')"),
            postgresql_where=sa.text("state NOT IN ('stopped', 'failed', 'lost')"),
        )
        batch_op.create_index("ix_sandboxes_state", ["state"], unique=False)
        batch_op.create_index("ix_sandboxes_workspace_created_at", ["workspace", "created_at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("sandboxes", schema=None) as batch_op:
        batch_op.drop_index("ix_sandboxes_workspace_created_at")
        batch_op.drop_index("ix_sandboxes_state")
        batch_op.drop_index(
            "ix_sandboxes_live_name",
            sqlite_where=sa.text("state NOT IN ('stopped', 'failed', 'lost')"),
            postgresql_where=sa.text("state NOT IN ('stopped', 'failed', 'lost')"),
        )
        batch_op.drop_index("ix_sandboxes_intent")
        batch_op.drop_index(
            "ix_sandboxes_gateway_stage",
            sqlite_where=sa.text("gateway_stage != 'forgotten'"),
            postgresql_where=sa.text("gateway_stage != 'forgotten'"),
        )

    op.drop_table("sandboxes")
    op.drop_table("open_intents")
    with op.batch_alter_table("idempotency", schema=None) as batch_op:
        batch_op.drop_index("ix_idempotency_intent")
        batch_op.drop_index("ix_idempotency_created_at")

    op.drop_table("idempotency")
    op.drop_table("api_keys")
    op.drop_table("workspaces")
    op.drop_table("server_starts")
    op.drop_table("journal_cursors")
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.drop_index("ix_audit_workspace_sandbox")
        batch_op.drop_index("ix_audit_workspace_action")
        batch_op.drop_index("ix_audit_source_seq")
        batch_op.drop_index(batch_op.f("ix_audit_intent_id"))

    op.drop_table("audit")
