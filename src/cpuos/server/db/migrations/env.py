"""Alembic's entry: one connection of its own, no logging set-up, SQLite tables altered by copy."""

from alembic import context
from sqlalchemy import create_engine, event, pool, text

from cpuos.server.db.models import Base, UtcDateTime


def render_item(kind, item, autogen_context):
    """A migration names our own column types by their class, which `script.py.mako` imports."""
    return "UtcDateTime()" if isinstance(item, UtcDateTime) else False


def migrate() -> None:
    url = context.config.attributes["url"].replace("+aiosqlite", "").replace("+asyncpg", "+psycopg")
    engine = create_engine(url, poolclass=pool.NullPool)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=10000"))
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.execute(text("PRAGMA journal_mode=WAL"))
        context.configure(
            connection=connection, target_metadata=Base.metadata, render_as_batch=True, render_item=render_item
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


migrate()
