from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from cpuos.settings import Settings
from cpuos.testing.node import FakeNode, fake_node, fake_settings
from cpuos.types.node import NodeSandboxCreate


@pytest.fixture
async def settings() -> AsyncIterator[Settings]:
    async with fake_settings() as settings:
        yield settings


@pytest.fixture
async def node(settings: Settings) -> AsyncIterator[FakeNode]:
    async with fake_node(settings) as node:
        yield node


@pytest.fixture
def asking() -> Callable[..., NodeSandboxCreate]:
    """Makes create requests: `asking("a")` is for the id aaaa…"""

    def ask(letter: str = "a", **changes: object) -> NodeSandboxCreate:
        values = {
            "id": letter * 20,
            "generation": 1,
            "template": "python",
            "runtime": "fake",
            "hostname": "box",
            "cpu": 1,
            "memory_mib": 256,
            "disk_mib": 64,
            "max_processes": 64,
        }
        return NodeSandboxCreate(**(values | changes))

    return ask
