"""Pause, resume, idle times, and snapshots"""

import sqlalchemy as sa
from alembic import op

from cpuos.server.db.models import UtcDateTime

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

KEPT = sa.text("state IN ('creating', 'ready')")


def upgrade() -> None:
    with op.batch_alter_table("workspaces", schema=None) as batch_op:
        batch_op.add_column(sa.Column("max_snapshots", sa.Integer(), nullable=True))
    with op.batch_alter_table("sandboxes", schema=None) as batch_op:
        batch_op.add_column(sa.Column("on_timeout", sa.String(length=8), nullable=False, server_default="kill"))
        batch_op.add_column(sa.Column("idle_timeout_s", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("on_idle", sa.String(length=8), nullable=False, server_default="pause"))
        batch_op.add_column(sa.Column("auto_resume", sa.Boolean(), nullable=False, server_default=sa.true()))
        batch_op.add_column(sa.Column("snapshot", sa.String(length=20), nullable=True))
        batch_op.add_column(sa.Column("paused_at", UtcDateTime(), nullable=True))
        batch_op.add_column(sa.Column("left_s", sa.Double(), nullable=True))
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("internal", sa.Boolean(), nullable=False),
        sa.Column("sandbox", sa.String(length=20), nullable=False),
        sa.Column("memory", sa.Boolean(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("template", sa.String(length=63), nullable=False),
        sa.Column("template_digest", sa.String(), nullable=False),
        sa.Column("runtime", sa.String(length=16), nullable=False),
        sa.Column("node", sa.String(length=63), nullable=False),
        sa.Column("cpu", sa.Integer(), nullable=False),
        sa.Column("memory_mib", sa.Integer(), nullable=False),
        sa.Column("disk_mib", sa.Integer(), nullable=False),
        sa.Column("max_processes", sa.Integer(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("network", sa.JSON(), nullable=False),
        sa.Column("created_by", sa.String(length=63), nullable=False),
        sa.Column("intent", sa.Integer(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("changed_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["sandbox"], ["sandboxes.id"], name=op.f("fk_snapshots_sandbox")),
        sa.ForeignKeyConstraint(["workspace"], ["workspaces.id"], name=op.f("fk_snapshots_workspace")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_snapshots")),
    )
    with op.batch_alter_table("snapshots", schema=None) as batch_op:
        batch_op.create_index(
            "ix_snapshots_name", ["workspace", "name"], unique=True, sqlite_where=KEPT, postgresql_where=KEPT
        )
        batch_op.create_index("ix_snapshots_workspace_created_at", ["workspace", "created_at"], unique=False)
        batch_op.create_index("ix_snapshots_intent", ["intent"], unique=False)


def downgrade() -> None:
    op.drop_table("snapshots")
    with op.batch_alter_table("sandboxes", schema=None) as batch_op:
        for name in ("left_s", "paused_at", "snapshot", "auto_resume", "on_idle", "idle_timeout_s", "on_timeout"):
            batch_op.drop_column(name)
    with op.batch_alter_table("workspaces", schema=None) as batch_op:
        batch_op.drop_column("max_snapshots")
