from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from unit.client.fake_api import FakeApi


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    fake = FakeApi()
    monkeypatch.setenv("CPUOS_API_URL", fake.url)
    monkeypatch.setenv("CPUOS_API_KEY", "cpk_test")
    yield fake
    fake.stop()


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Retries do not wait; the list has what they would have waited."""
    waited: list[float] = []

    async def sleep_async(seconds: float) -> None:
        waited.append(seconds)

    for module in ("connection", "job", "files", "transfer"):
        asynchronous = importlib.import_module(f"cpuos.client._async.{module}")
        plain = importlib.import_module(f"cpuos.client._sync.{module}")
        monkeypatch.setattr(asynchronous, "sleep", sleep_async)
        monkeypatch.setattr(plain, "sleep", waited.append)
    return waited
