"""How a sandbox came to be: taken from the pool, restored or begun cold"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("started_from", sa.String(length=8), nullable=True))


def downgrade() -> None:
    op.drop_column("sandboxes", "started_from")
