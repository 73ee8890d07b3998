"""Alembic's entry. All missing migrations are one transaction: a start that is killed here leaves none of them."""

from alembic import context
from sqlalchemy import create_engine, event, pool

from cpuos.server.db.database import begin_immediate, prepare_connection
from cpuos.server.db.models import Base, UtcDateTime


def render_item(kind, item, autogen_context):
    """A migration names our own column types by their class, which `script.py.mako` imports."""
    return "UtcDateTime()" if isinstance(item, UtcDateTime) else False


def migrate() -> None:
    engine = create_engine(context.config.attributes["url"], poolclass=pool.NullPool)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", prepare_connection)
        event.listen(engine, "begin", begin_immediate)
    with engine.connect() as connection:
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            render_as_batch=True,
            render_item=render_item,
            transactional_ddl=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


migrate()
