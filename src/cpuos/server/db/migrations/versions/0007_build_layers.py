"""What the steps of builds have left, for later builds"""

import sqlalchemy as sa
from alembic import op

from cpuos.server.db.models import UtcDateTime

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "build_layers",
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("snapshot", sa.String(length=20), nullable=False),
        sa.Column("parent_digest", sa.String(length=80), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["workspace"], ["workspaces.id"], name=op.f("fk_build_layers_workspace")),
        sa.PrimaryKeyConstraint("workspace", "key", name=op.f("pk_build_layers")),
    )


def downgrade() -> None:
    op.drop_table("build_layers")
