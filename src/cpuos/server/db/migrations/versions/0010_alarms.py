"""Rules of alarms, of workspaces and of sandboxes, and alarms that go on"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("workspaces", "alarms"),
    ("sandboxes", "alarms"),
    ("sandboxes", "active_alarms"),
    ("snapshots", "alarms"),
)


def upgrade() -> None:
    for table, column in _COLUMNS:
        op.add_column(table, sa.Column(column, sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    for table, column in reversed(_COLUMNS):
        op.drop_column(table, column)
