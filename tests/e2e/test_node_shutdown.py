"""A machine is shut down in order: what ran in its sandboxes goes on after the next start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpuos import Client, Sandbox
from cpuos.errors import CpuosError
from cpuos.services.control import pause_sandboxes
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from cpuos.types.sandbox import SandboxState

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

SMALL = {"template": "base", "memory": "256MiB", "disk": "256MiB", "cpu": 1, "timeout": "10m"}
COUNTER = "n=0; while true; do n=$((n+1)); echo $n; sleep 0.05; done"


@pytest.fixture
def own() -> Iterator[Instance]:
    with Instance(runtime="gvisor", max_sandboxes=6) as instance:
        yield instance


def test_running_work_goes_on_after_a_shutdown(own: Instance) -> None:
    client: Client = own.client()
    with Sandbox.create(client=client, **SMALL) as one, Sandbox.create(client=client, **SMALL) as other:
        one.exec("echo kept > file && mkdir -p /var/tmp/more && echo kept > /var/tmp/more/file", check=True)
        job = one.spawn(COUNTER)
        wait_until(lambda: job.output().count(b"\n") > 5)
        other.pause()
        paused, left = pause_sandboxes(own.settings)
        assert (paused, left) == ([one.id], {})
        wait_until(lambda: one.refresh().state is SandboxState.PAUSED)
        assert one.info.reason == "its node was shut down"
        with pytest.raises(CpuosError):
            Sandbox.create(client=client, **SMALL)
        for part in ("server", "gateway", "node"):
            own.stop(part)
        for part in ("node", "gateway", "server"):
            own.start(part)
        own.wait_ready()
        assert one.refresh().state is SandboxState.PAUSED
        assert other.refresh().state is SandboxState.PAUSED
        assert one.exec("cat file /var/tmp/more/file", check=True).stdout == "kept\nkept\n"
        wait_until(lambda: one.refresh().state is SandboxState.RUNNING)  # written a moment after the call
        assert (one.info.resumed_from, one.info.reason) == ("memory", "")
        before = job.output().count(b"\n")
        wait_until(lambda: job.output().count(b"\n") > before + 5)
        numbers = job.output().decode().split()
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
        job.kill()
        other.resume()
        assert other.exec("echo here").stdout == "here\n"
    wait_until(lambda: own.leftovers() == [], within_s=60)


def test_a_killed_node_is_no_shutdown(own: Instance) -> None:
    client = own.client()
    with Sandbox.create(client=client, **SMALL) as sandbox:
        job = sandbox.spawn(COUNTER)
        wait_until(lambda: job.output().count(b"\n") > 3)
        own.kill("node")
        own.wait_ready()
        own.restart("node")
        own.wait_ready()
        assert sandbox.refresh().state is SandboxState.RUNNING
        before = job.output().count(b"\n")
        wait_until(lambda: job.output().count(b"\n") > before + 3)
        job.kill()
