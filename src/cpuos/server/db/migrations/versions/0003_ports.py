"""Published ports"""

import sqlalchemy as sa
from alembic import op

from cpuos.server.db.models import UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ports",
        sa.Column("sandbox", sa.String(length=20), nullable=False),
        sa.Column("port", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("public_until", UtcDateTime(), nullable=True),
        sa.Column("host", sa.String(length=16), nullable=True),
        sa.Column("created_by", sa.String(length=63), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("closed_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(["sandbox"], ["sandboxes.id"], name=op.f("fk_ports_sandbox")),
        sa.PrimaryKeyConstraint("sandbox", "port", name=op.f("pk_ports")),
    )


def downgrade() -> None:
    op.drop_table("ports")
