"""Ready sandboxes of the fake runtime, by all parts and the public SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpuos import Client, Sandbox
from cpuos.services.health import ask
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from cpuos.types.sandbox import StartedFrom

SHAPE = {"cpu": 1, "memory": "256MiB", "disk": "64MiB"}


@pytest.fixture(scope="module")
def pooled() -> Iterator[Instance]:
    with Instance(runtime="fake", pool_memory_mib=4096, pool_keep=["python@1x256x64=2"]) as instance:
        yield instance


@pytest.fixture(scope="module")
def client(pooled: Instance) -> Client:
    return pooled.client()


def ready(pooled: Instance) -> list[str]:
    _, pool = ask(pooled.settings.node_socket, "/v1/pool", timeout_s=30)
    return [one["id"] for one in pool["ready"]]


def from_pool(client: Client) -> Sandbox:
    """The server hears of what is ready a moment after that is."""
    while True:
        sandbox = Sandbox.create(client=client, **SHAPE)
        if sandbox.started_from is StartedFrom.POOL:
            return sandbox
        sandbox.kill()


def test_each_is_taken_once_and_is_as_any_other(pooled: Instance, client: Client) -> None:
    wait_until(lambda: len(ready(pooled)) >= 2)
    with from_pool(client) as one, from_pool(client) as other:
        assert one.id != other.id
        assert one.exec(["echo", "one"], check=True).stdout == "one\n"
        one.files.write("/workspace/mine", b"x")
        assert other.files.list("/workspace") == []
        assert {one.id, other.id} <= {listed.id for listed in Sandbox.list(client=client)}
        assert not {one.id, other.id} & set(ready(pooled))


def test_with_a_name_it_begins_cold(pooled: Instance, client: Client) -> None:
    wait_until(lambda: len(ready(pooled)) >= 1)
    with Sandbox.create(client=client, name="named", **SHAPE) as sandbox:
        assert sandbox.started_from is StartedFrom.COLD


def test_those_that_are_ready_are_nobody_s(pooled: Instance, client: Client) -> None:
    wait_until(lambda: len(ready(pooled)) >= 2)
    waiting = set(ready(pooled))
    assert not waiting & {one.id for one in Sandbox.list(client=client, state="all")}
    assert client.get_json("/v1/capacity")["sandboxes"]["reserved"] == 0
    (node,) = client.get_json("/v1/nodes")["nodes"]
    assert node["pool"]["ready"] >= 2
