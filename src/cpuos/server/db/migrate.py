"""Bring the schema to this version. Runs before the server opens the database."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

__all__ = ["upgrade_database"]


def upgrade_database(url: str) -> None:
    """Apply the migrations that are missing; none missing is quick."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = url
    command.upgrade(config, "head")
