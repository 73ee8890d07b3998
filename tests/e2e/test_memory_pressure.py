"""A host that is short of memory, with real sandboxes: what is paused, what is refused, and that it is told."""

from __future__ import annotations

import pytest

from cpuos import Client, Sandbox
from cpuos.errors import CapacityExceeded
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(900)]

ALL_OF_IT = 1 << 22
"""MiB that no host has free: it is always short."""
SMALL = {"template": "base", "memory": "256MiB", "disk": "64MiB"}


@pytest.fixture
def own():
    with Instance(runtime="gvisor", pressure_idle_s=2, max_sandboxes=4) as instance:
        yield instance


def node(client: Client) -> dict:
    return client.get_json("/v1/nodes")["nodes"][0]


def told(client: Client) -> list[str]:
    return [entry.detail["level"] for entry in client.audit(action="node.pressure").entries]


def test_the_steps_of_a_real_node(own: Instance) -> None:
    client = own.client()
    with Sandbox.create(client=client, **SMALL) as idle, Sandbox.create(client=client, **SMALL) as busy:
        room = node(client)["room"]
        assert set(room) == {"sandboxes", "cpu", "memory_mib", "processes", "disk_mib"}
        wait_until(lambda: node(client)["room"]["sandboxes"] == {"total": 4, "held": 2}, within_s=150)
        idle.files.write("kept", b"bytes")
        job = busy.spawn("sleep 600")
        own.stop("node")
        own.settings = own.settings.model_copy(update={"memory_pressure_mib": ALL_OF_IT})
        own.start("node")
        wait_until(lambda: idle.refresh().state == "paused", within_s=150)
        assert "short of memory" in idle.info.reason
        wait_until(lambda: node(client)["pressure"]["level"] == "refuse_new", within_s=150)
        with pytest.raises(CapacityExceeded, match="nothing new"):
            Sandbox.create(client=client, **SMALL)
        with pytest.raises(CapacityExceeded, match="nothing new"):
            idle.resume()
        assert idle.refresh().state == "paused"
        assert (busy.refresh().state, job.refresh().status) == ("running", "running")
        assert any("short of memory" in alarm for alarm in client.get_json("/v1/health")["alarms"])
        wait_until(lambda: told(client)[-1:] == ["refuse_new"])
        own.stop("node")
        own.settings = own.settings.model_copy(update={"memory_pressure_mib": 0})
        own.start("node")
        wait_until(lambda: node(client)["pressure"]["level"] == "none", within_s=150)
        assert idle.files.read("kept") == b"bytes"  # the call resumes it
        wait_until(lambda: told(client)[-2:] == ["refuse_new", "none"])
