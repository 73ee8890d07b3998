from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from control_plane import Installation, Server
from cpuos.server.db.migrate import upgrade_database


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Its console traceback with all locals takes seconds a fault."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of this version: copied, because migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("migrated") / "cpuos.db"
    upgrade_database(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture
async def installation(tmp_path: Path, migrated: Path) -> Installation:
    shutil.copy(migrated, tmp_path)
    return Installation(folder=tmp_path)


@pytest.fixture
async def server(installation: Installation) -> AsyncIterator[Server]:
    async with installation.serve() as running:
        yield running
