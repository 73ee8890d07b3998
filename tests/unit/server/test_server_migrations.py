"""Migrations make exactly the tables of the models, once, whole or not at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from cpuos.server.db.migrate import MIGRATIONS, upgrade_database
from cpuos.server.db.models import Base


def test_migrations_equal_models(tmp_path: Path) -> None:
    upgrade_database(f"sqlite+aiosqlite:///{tmp_path}/a.db")
    engine = create_engine(f"sqlite:///{tmp_path}/a.db")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, Base.metadata)
    engine.dispose()
    assert differences == []


def test_a_second_upgrade_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/a.db"
    upgrade_database(url)
    upgrade_database(url)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        versions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        assert versions == [(ScriptDirectory(str(MIGRATIONS)).get_current_head(),)]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_migration_that_breaks_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/a.db"
    made: list[str] = []
    create = op.create_table

    def break_at_third(name: str, *columns: Any, **options: Any) -> Any:
        made.append(name)
        if len(made) == 3:
            raise RuntimeError("power cut")
        return create(name, *columns, **options)

    with monkeypatch.context() as patch:
        patch.setattr(op, "create_table", break_at_third)
        with pytest.raises(RuntimeError, match="power cut"):
            upgrade_database(url)
    assert len(made) == 3
    with sqlite3.connect(tmp_path / "a.db") as connection:
        assert connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == []
    connection.close()
    upgrade_database(url)


def test_the_newest_file_is_alembics_head(tmp_path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    upgrade_database(f"sqlite+aiosqlite:///{tmp_path}/a.db")
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        versions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    assert versions == [(ScriptDirectory.from_config(config).get_current_head(),)]
    assert versions == [(max(path.stem.split("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py")),)]
