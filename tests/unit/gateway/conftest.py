from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_rig import DataClient, LocalDialler, Rig, agent_program, go_agent, open_rig
from preview_rig import PreviewRig, open_previews


@pytest.fixture(scope="session")
def agent_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = agent_program(tmp_path_factory.mktemp("agent"))
    if program is None:
        pytest.skip("the guest agent needs Go to build")
    return program


@pytest.fixture
async def dialler() -> LocalDialler:
    return LocalDialler(address=("127.0.0.1", 1))


@pytest.fixture
async def agent(agent_binary: Path, tmp_path: Path, dialler: LocalDialler) -> AsyncIterator[int]:
    async with go_agent(agent_binary, tmp_path, dialler) as pid:
        yield pid


@pytest.fixture
async def rig(agent: int, dialler: LocalDialler, tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path, dialler) as rig:
        answer = await rig.attach()
        assert answer.status_code == 200, answer.text
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[DataClient]:
    async with rig.client() as client:
        yield client


@pytest.fixture
async def previews(rig: Rig) -> AsyncIterator[PreviewRig]:
    async with open_previews(rig) as previews:
        yield previews
