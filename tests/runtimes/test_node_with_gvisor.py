"""The node daemon with real disks, slots and gVisor: a fault and a kill at every step leave nothing on the host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cpuos.errors import CpuosError, PlatformError
from cpuos.node.client import DialClient, LocalNodeClient
from cpuos.testing.node import fault_is_pending, plan_fault
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer
from gvisor_node import Node, gvisor_node

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

A = "a" * 20
CREATE = [
    f"create.{step}.{side}"
    for step in ("record", "workdir", "disk", "slot", "start", "running")
    for side in ("before", "after")
]
DELETE = [
    f"delete.{step}.{side}"
    for step in ("record", "image", "destroy", "slot", "disk", "workdir", "gone")
    for side in ("before", "after")
]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with gvisor_node() as node:
        yield node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[LocalNodeClient]:
    async with LocalNodeClient(node.settings.node_socket) as client:
        await node.ready(client)
        yield client


@pytest.mark.parametrize("point", CREATE)
async def test_failed_create_leaves_nothing(node: Node, client: LocalNodeClient, point: str) -> None:
    plan_fault(node.settings, point)
    request = node.next()
    with pytest.raises(PlatformError, match="cannot create sandbox"):
        await client.create(request)
    assert not fault_is_pending(node.settings)
    assert node.traces() == []
    assert (await client.create(request)).alive
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


@pytest.mark.parametrize("point", DELETE)
async def test_failed_delete_is_finished_by_its_repeat(node: Node, client: LocalNodeClient, point: str) -> None:
    request = node.next()
    await client.create(request)
    plan_fault(node.settings, point)
    with pytest.raises(PlatformError, match="cannot delete sandbox"):
        await client.delete(A, generation=request.generation)
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


@pytest.mark.parametrize("point", CREATE)
async def test_killed_inside_create(node: Node, client: LocalNodeClient, point: str) -> None:
    plan_fault(node.settings, point, kill=True)
    request = node.next()
    with pytest.raises(CpuosError) as caught:
        await client.create(request)
    assert caught.value.code == "node_unavailable"
    node.process.wait()
    await node.ready(client)
    if point != "create.running.after":
        assert node.traces() == []
    assert (await client.create(request)).alive
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


@pytest.mark.parametrize("point", DELETE)
async def test_killed_inside_delete(node: Node, client: LocalNodeClient, point: str) -> None:
    request = node.next()
    await client.create(request)
    plan_fault(node.settings, point, kill=True)
    with pytest.raises(CpuosError):
        await client.delete(A, generation=request.generation)
    node.process.wait()
    await node.ready(client)
    if point != "delete.record.before":
        assert node.traces() == []
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


async def test_a_killed_daemon_adopts_and_reaches_its_sandbox(node: Node, client: LocalNodeClient) -> None:
    request = node.next()
    await client.create(request)
    node.process.kill()
    await node.ready(client)
    assert (await client.get(A)).alive
    assert (await client.stats(A)).processes >= 1
    dialled = await DialClient(node.settings.dial_socket).dial(A, request.generation)
    with dialled.socket as guest:
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(guest, dialled.address), 30)
    after = (await client.changes(0)).seq
    path = node.settings.node_state_dir / "journal" / f"{A}.json"
    await asyncio.to_thread(_kill_recorded, path)
    heard = await client.changes(after, wait_s=60)
    assert [(facts.id, facts.alive) for facts in heard.changes] == [(A, False)]
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


async def test_a_daemon_killed_while_it_stocks_up_leaves_no_disk(node: Node, client: LocalNodeClient) -> None:
    stock = node.settings.node_state_dir / "disk-stock"
    before = await _stocked(stock)
    node.process.kill()
    await node.ready(client)
    after = await _stocked(stock, other_than=before)
    assert not before & set(os.listdir(stock))
    request = node.next().model_copy(update={"disk_mib": 8192})
    assert (await client.create(request)).alive
    disk = node.settings.node_state_dir / "disks" / A / "disk.json"
    assert f"8192.{json.loads(disk.read_text())['uuid']}" in after
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


async def _stocked(stock: Path, *, other_than: set[str] = frozenset()) -> set[str]:
    """Names of the disks in stock, once there are two besides these: the first is whole then."""
    deadline = time.monotonic() + 90
    while len(found := _names(stock) - other_than) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return found


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.exists() else set()


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize(
    "point", [f"network.{step}.{side}" for step in ("record", "apply") for side in ("before", "after")]
)
async def test_a_policy_change_that_stops_anywhere_is_finished(
    node: Node, client: LocalNodeClient, point: str, kill: bool
) -> None:
    request = node.next()
    await client.create(request)
    layers = [PolicyLayer(origin="sandbox", policy=NetworkPolicy(allow=["1.2.3.4:80"]))]
    policy = EffectivePolicy(version=2, layers=layers)
    plan_fault(node.settings, point, kill=kill)
    with pytest.raises(CpuosError):
        await client.update_network(A, generation=request.generation, policy=policy)
    if kill:
        node.process.wait()
        await node.ready(client)
    assert (await client.get(A)).alive
    journaled = json.loads((node.settings.node_state_dir / "journal" / f"{A}.json").read_text())["network"]
    assert (journaled is None) == (point == "network.record.before")
    if kill and journaled is not None:
        assert "1.2.3.4" in node.router_rules(), "the next daemon puts in force what is journaled"
    await client.update_network(A, generation=request.generation, policy=policy)
    assert "1.2.3.4" in node.router_rules()
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


def _kill_recorded(path: Path) -> None:
    os.kill(json.loads(path.read_text())["process"]["pid"], signal.SIGKILL)
