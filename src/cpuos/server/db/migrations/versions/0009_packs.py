"""Data packs of workspaces, and which of them a sandbox or snapshot has"""

import sqlalchemy as sa
from alembic import op

from cpuos.server.db.models import UtcDateTime

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "packs",
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("image", sa.String(length=63), nullable=False),
        sa.Column("node", sa.String(length=63), nullable=False),
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("created_by", sa.String(length=63), nullable=False),
        sa.ForeignKeyConstraint(["workspace"], ["workspaces.id"], name=op.f("fk_packs_workspace")),
        sa.PrimaryKeyConstraint("workspace", "name", name=op.f("pk_packs")),
    )
    for table in ("sandboxes", "snapshots"):
        op.add_column(table, sa.Column("packs", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    for table in ("sandboxes", "snapshots"):
        op.drop_column(table, "packs")
    op.drop_table("packs")
