"""`cpuos up`, `status`, `down` and `uninstall` of a private instance, with a real sandbox."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos import Client, Sandbox, services
from cpuos.errors import Unavailable
from cpuos.services.processes import find_process
from cpuos.services.record import read_record
from cpuos.settings import Settings, load_settings
from cpuos.setup.source import environment_path

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run with one version of the code, also while an editor saves files."""
    environment = environment_path(load_settings())
    monkeypatch.setattr("cpuos.services.control.environment_path", lambda settings: environment)


@pytest.fixture
def settings() -> Iterator[Settings]:
    # Not pytest's own folder: the daemons' users must be able to pass it.
    folder = Path(tempfile.mkdtemp(prefix="cpuos-test-"))
    folder.chmod(0o755)
    made = load_settings(state_dir=folder / "state", run_dir=folder / "run", api_port=0, gateway_port=0, preview_port=0)
    yield made
    services.uninstall(made, purge=True)
    assert list(folder.iterdir()) == []
    shutil.rmtree(folder)


def client_of(instance: services.Instance) -> Client:
    stored = json.loads(instance.credentials.read_text())
    return Client(api_url=stored["api_url"], api_key=stored["api_key"])


def traces(settings: Settings) -> list[str]:
    """Everything on the host that carries the instance's name or folders."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(settings.run_dir) in line]
    groups = Path("/sys/fs/cgroup")
    found += [str(path) for path in groups.glob(f"*/cpuos-{settings.instance_id}*/*/*")]
    found += [
        line
        for line in subprocess.check_output(["losetup", "-a"], text=True).splitlines()
        if str(settings.state_dir) in line
    ]
    processes = subprocess.check_output(["ps", "-eo", "args"], text=True)
    return found + [line for line in processes.splitlines() if str(settings.run_dir) in line]


def test_an_instance_comes_stays_and_goes(settings: Settings) -> None:
    first = services.up(settings)
    assert first.started
    again = services.up(settings, prepare=False)
    assert not again.started
    assert (again.api_url, again.gateway_url) == (first.api_url, first.gateway_url)
    for path, mode in ((settings.run_dir, 0o750), (settings.state_dir, 0o750), (first.credentials, 0o600)):
        assert path.stat().st_mode & 0o777 == mode

    with client_of(first) as client:
        sandbox = Sandbox.create(template="base", client=client)
        assert sandbox.exec("echo hello").stdout == "hello\n"
        _kill_each_part(settings)
        assert sandbox.exec("echo hello again").stdout == "hello again\n"

        assert services.down(settings, keep_sandboxes=True)
        assert services.status(settings).state == "stopped"
        kept = services.up(settings, prepare=False)
        assert kept.started

    with client_of(kept) as client:
        assert Sandbox.connect(sandbox.id, client=client).exec("echo still here").stdout == "still here\n"

    record = read_record(settings)
    assert record is not None
    assert services.down(settings)
    assert not services.down(settings)
    assert services.status(settings).state == "stopped"
    assert all(find_process(part.process.pid) is None for part in record.parts.values())
    services.uninstall(settings)
    assert not settings.run_dir.exists()
    assert traces(settings) == []


def test_a_part_that_cannot_start_is_told_and_nothing_stays(settings: Settings) -> None:
    broken = settings.model_copy(update={"database_url": "sqlite+aiosqlite:////nowhere/cpuos.db"})
    services.up(settings)
    services.down(settings)
    with pytest.raises(Unavailable) as caught:
        services.up(broken, prepare=False, ready_s=30)
    assert "cannot start cpuOS: the server" in caught.value.what
    assert "server.log" in caught.value.hint
    assert services.status(settings).state == "stopped"


def _kill_each_part(settings: Settings) -> None:
    for name in ("gateway", "node", "server"):
        record = read_record(settings)
        assert record is not None
        os.kill(record.parts[name].process.pid, signal.SIGKILL)
        _wait_until_new(settings, name, old=record.parts[name].process.pid)


def _wait_until_new(settings: Settings, name: str, *, old: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        part = next(part for part in services.status(settings).parts if part.name == name)
        if part.state == "ready" and part.pid not in (None, old):
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} did not come back")
