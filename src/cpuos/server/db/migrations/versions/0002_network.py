"""Network policies of workspaces and sandboxes, and the record of connections"""

import sqlalchemy as sa
from alembic import op

from cpuos.server.db.models import UtcDateTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INTERNET = '{"mode": "internet"}'


def upgrade() -> None:
    with op.batch_alter_table("workspaces", schema=None) as batch_op:
        batch_op.add_column(sa.Column("network", sa.JSON(), nullable=False, server_default=INTERNET))
    with op.batch_alter_table("sandboxes", schema=None) as batch_op:
        batch_op.add_column(sa.Column("network", sa.JSON(), nullable=False, server_default=INTERNET))
        batch_op.add_column(sa.Column("network_version", sa.Integer(), nullable=False, server_default="1"))
        batch_op.add_column(sa.Column("network_applied", sa.Integer(), nullable=False, server_default="1"))
    op.create_table(
        "connections",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("sandbox", sa.String(length=20), nullable=False),
        sa.Column("command", sa.String(length=16), nullable=True),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=253), nullable=True),
        sa.Column("address", sa.String(length=15), nullable=True),
        sa.Column("port", sa.Integer(), nullable=True),
        sa.Column("verdict", sa.String(length=8), nullable=False),
        sa.Column("rule", sa.String(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("bytes_sent", sa.BigInteger(), nullable=True),
        sa.Column("bytes_received", sa.BigInteger(), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.Column("source", sa.String(length=63), nullable=False),
        sa.Column("connection", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_connections")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("connections", schema=None) as batch_op:
        batch_op.create_index("ix_connections_source_connection", ["source", "connection"], unique=True)
        batch_op.create_index("ix_connections_workspace_sandbox", ["workspace", "sandbox", "id"], unique=False)
