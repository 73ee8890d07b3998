"""Lost sandboxes that are made anew, and what came back of what was saved"""

import sqlalchemy as sa
from alembic import op

from cpuos.server.db.models import UtcDateTime

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ADDED = {
    "lost_at": UtcDateTime(),
    "lost_reason": sa.String(),
    "recreated": sa.JSON(),
    "resumed_from": sa.String(length=8),
    "restore_incomplete": sa.JSON(),
    "receipt": sa.JSON(),
    "root_checkpoint_interval_s": sa.Double(),
}


def upgrade() -> None:
    for name, kind in ADDED.items():
        op.add_column("sandboxes", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    for name in ADDED:
        op.drop_column("sandboxes", name)
