"""pytest fixtures of a private instance: `pytest_plugins = ["cpuos.testing.fixtures"]`.

`instance` is one for the whole session, with real sandboxes where the machine can (root and set-up), else the fake
runtime; `CPUOS_TESTING_RUNTIME` chooses. Tests marked `gvisor` are skipped where it cannot.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator, Iterator

import pytest

from cpuos.client import AsyncClient, Client
from cpuos.errors import CpuosError
from cpuos.settings import load_settings
from cpuos.setup.microvm import QEMU
from cpuos.testing.instance import Instance
from cpuos.testing.sealed import SealedInstance, SealedWorld

__all__ = [
    "async_client",
    "client",
    "fake_instance",
    "instance",
    "microvm_instance",
    "pytest_collection_modifyitems",
    "pytest_runtest_makereport",
    "sealed",
    "sealed_instance",
    "small_instance_capacity",
]

RUNTIME_VARIABLE = "CPUOS_TESTING_RUNTIME"
MAX_SANDBOXES = 12
MAX_MICROVMS = 6
LOG_LINES = 150
LIVE = {"creating", "running", "stopping"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {"gvisor": _why_not_gvisor(), "microvm": _why_not_microvm()}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what the parts of its instances wrote last."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Instance):
                report.sections.append((f"logs of {name}", value.logs(lines=LOG_LINES)))
    return report


@pytest.fixture(scope="session")
def instance() -> Iterator[Instance]:
    runtime = os.environ.get(RUNTIME_VARIABLE) or ("fake" if _why_not_gvisor() else "gvisor")
    with Instance(runtime=runtime, max_sandboxes=MAX_SANDBOXES) as instance:
        yield instance


@pytest.fixture(scope="session")
def fake_instance() -> Iterator[Instance]:
    """Always the fake runtime: fast, and nothing is isolated."""
    with Instance(runtime="fake", max_sandboxes=MAX_SANDBOXES) as instance:
        yield instance


@pytest.fixture(scope="session")
def microvm_instance() -> Iterator[Instance]:
    """Sandboxes with a kernel of their own; emulated where KVM does not boot."""
    with Instance(runtime="microvm", max_sandboxes=MAX_MICROVMS, allow_emulated=True) as instance:
        yield instance


@pytest.fixture(scope="session")
def sealed() -> Iterator[SealedWorld]:
    """A host without a way out, and a fake internet behind it; needs root. Tests share it: `sealed.clear()` first."""
    if os.geteuid() != 0:
        pytest.skip("a sealed network world needs root")
    with SealedWorld() as world:
        yield world


@pytest.fixture(scope="session")
def sealed_instance(sealed: SealedWorld) -> Iterator[SealedInstance]:
    """A whole instance with real sandboxes inside the sealed world."""
    reason = _why_not_gvisor()
    if reason:
        pytest.skip(reason)
    with sealed.instance(runtime="gvisor", max_sandboxes=MAX_SANDBOXES, alarm_interval_s=0.5) as instance:
        yield instance


@pytest.fixture(scope="session")
def client(instance: Instance) -> Client:
    return instance.client()


@pytest.fixture
async def async_client(instance: Instance) -> AsyncIterator[AsyncClient]:
    async with instance.async_client() as client:
        yield client


@pytest.fixture
def small_instance_capacity(instance: Instance, client: Client) -> int:
    """How many more sandboxes the instance takes now."""
    sandboxes = client.get_json("/v1/sandboxes")["sandboxes"]
    return instance.settings.max_sandboxes - sum(sandbox["state"] in LIVE for sandbox in sandboxes)


@pytest.fixture(autouse=True)
def _instance_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks for the instance finds it in its environment too, as a user's script would."""
    if "instance" in request.fixturenames:
        instance: Instance = request.getfixturevalue("instance")
        monkeypatch.setenv("CPUOS_API_URL", instance.api_url)
        monkeypatch.setenv("CPUOS_API_KEY", instance.api_key)


def _why_not_gvisor() -> str:
    if os.geteuid() != 0:
        return "real sandboxes need root"
    try:
        settings = load_settings()
    except CpuosError as error:
        return str(error)
    for path in (settings.runsc_path, settings.agent_path, settings.template_dir / "python" / "root.erofs"):
        if not path.exists():
            return f"set-up has not made {path}; run `cpuos setup`"
    return ""


def _why_not_microvm() -> str:
    if reason := _why_not_gvisor():
        return reason
    settings = load_settings()
    for path in (QEMU, settings.microvm_dir / "manifest.json"):
        if not path.exists():
            return f"set-up has not made {path}; run `cpuos setup microvm`"
    return ""
