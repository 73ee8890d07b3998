from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane import Installation, Server


@pytest.fixture
async def installation(tmp_path: Path) -> Installation:
    return Installation(folder=tmp_path)


@pytest.fixture
async def server(installation: Installation) -> AsyncIterator[Server]:
    async with installation.serve() as running:
        yield running
