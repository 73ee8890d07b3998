from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from control_plane import Installation, Server


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Its console traceback with all locals takes seconds a fault."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture
async def installation(tmp_path: Path) -> Installation:
    return Installation(folder=tmp_path)


@pytest.fixture
async def server(installation: Installation) -> AsyncIterator[Server]:
    async with installation.serve() as running:
        yield running
