"""Bring the schema to this version. Runs before the server opens the database."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine, pool, text
from sqlalchemy.exc import DBAPIError

__all__ = ["MIGRATIONS", "sync_url", "upgrade_database"]

MIGRATIONS = Path(__file__).parent / "migrations"


def upgrade_database(url: str) -> None:
    """Apply the migrations that are missing; when none is, Alembic is not even loaded."""
    if _version(url) == _newest():
        return
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = sync_url(url)
    command.upgrade(config, "head")


def sync_url(url: str) -> str:
    """The same database through a driver that Alembic can use."""
    return url.replace("+aiosqlite", "").replace("+asyncpg", "+psycopg")


def _version(url: str) -> str | None:
    engine = create_engine(sync_url(url), poolclass=pool.NullPool)
    try:
        with engine.connect() as connection:
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    except DBAPIError:
        return None  # an empty database has no such table
    finally:
        engine.dispose()


def _newest() -> str:
    """Files are NNNN_what_it_does.py, and NNNN is the revision."""
    return max(path.stem.split("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))
