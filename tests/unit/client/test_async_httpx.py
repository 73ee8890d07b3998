"""The same calls through httpx2, which serves TLS and proxies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpuos import AsyncClient, AsyncSandbox
from cpuos.errors import Unavailable
from unit.client.fake_api import FakeApi, Fault, Program

COMMANDS = r"/v1/sandboxes/\w+/commands"
FILES = r"/v1/sandboxes/\w+/files"


@pytest.fixture(autouse=True)
def _by_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.client._async.http.needs_httpx", lambda url: True)


async def test_commands_and_cuts(api: FakeApi, delays: list[float]) -> None:
    api.frame_bytes = 1000
    api.program = lambda start: Program([("stdout", b"x" * 5000)], exit_code=2)
    async with await AsyncSandbox.create() as sbx:
        for cut in (0, 10, 400, 3000):
            api.faults = [Fault("POST", COMMANDS, cut_after=cut), Fault("GET", f"{COMMANDS}/.*", close=True)]
            result = await sbx.exec("x")
            assert (result.stdout, result.exit_code) == ("x" * 5000, 2)


async def test_files(api: FakeApi, delays: list[float], tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    async with await AsyncSandbox.create() as sbx:
        for given in (data, iter([data]), b""):
            await sbx.files.write("f", given)
        await sbx.files.write("f", data)
        api.faults = [Fault("GET", FILES, cut_after=500_000)]
        assert await sbx.files.read("f") == data
        await sbx.files.download("f", tmp_path / "f")
        await sbx.files.upload(tmp_path / "f", "g")
    assert api.files[b"g"] == data


async def test_nobody_there(delays: list[float]) -> None:
    client = AsyncClient("http://127.0.0.1:9", "cpk_x")
    with pytest.raises(Unavailable):
        await AsyncSandbox.create(client=client)
    await client.close()
