"""Templates that users build"""

import sqlalchemy as sa
from alembic import op

from cpuos.server.db.models import UtcDateTime

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("sandboxes", "snapshots"):
        op.add_column(table, sa.Column("image", sa.String(length=63), nullable=True))
    op.create_table(
        "templates",
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("image", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("manifest", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["workspace"], ["workspaces.id"], name=op.f("fk_templates_workspace")),
        sa.PrimaryKeyConstraint("workspace", "name", name=op.f("pk_templates")),
    )
    op.create_index(op.f("ix_templates_workspace_key"), "templates", ["workspace", "key"])
    op.create_table(
        "builds",
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("sandbox", sa.String(length=20), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("build", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["workspace"], ["workspaces.id"], name=op.f("fk_builds_workspace")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_builds")),
    )
    op.create_index(op.f("ix_builds_state"), "builds", ["state"])


def downgrade() -> None:
    op.drop_table("builds")
    op.drop_table("templates")
    for table in ("sandboxes", "snapshots"):
        op.drop_column(table, "image")
