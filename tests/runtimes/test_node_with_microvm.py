"""The node daemon with microVMs: nothing is left after faults and kills, and a guest's disk is never looked at."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cpuos.errors import CpuosError, PlatformError
from cpuos.node.client import DialClient, LocalNodeClient
from cpuos.testing.node import fault_is_pending, plan_fault
from gvisor_node import Node, gvisor_node

pytestmark = [pytest.mark.microvm, pytest.mark.timeout(300)]

A, B = "a" * 20, "b" * 20
POINTS = ["disk.after", "slot.after", "start.before", "start.after", "running.after"]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with gvisor_node(runtime="microvm") as node:
        yield node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[LocalNodeClient]:
    async with LocalNodeClient(node.settings.node_socket) as client:
        await node.ready(client)
        yield client


def machine_of(node: Node, sandbox_id: str = A) -> int:
    path = node.settings.node_state_dir / "journal" / f"{sandbox_id}.json"
    return int(json.loads(path.read_text())["process"]["pid"])


def status_of(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def mounted_of(node: Node, sandbox_id: str) -> list[str]:
    """Mounts and loop devices that name the sandbox."""
    mounts = Path(f"/proc/{node.process.pid}/mountinfo").read_text().splitlines()
    backed = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    loops = [path for path in backed if path.startswith(f"{node.settings.node_state_dir}/")]  # the host has others too
    return [line for line in [*mounts, *loops] if sandbox_id in line]


@pytest.mark.parametrize("point", POINTS)
async def test_failed_create_leaves_nothing(node: Node, client: LocalNodeClient, point: str) -> None:
    plan_fault(node.settings, f"create.{point}")
    with pytest.raises(PlatformError, match="cannot create sandbox"):
        await client.create(node.next())
    assert not fault_is_pending(node.settings)
    assert node.traces() == []


@pytest.mark.parametrize("point", POINTS[2:])
async def test_killed_inside_create(node: Node, client: LocalNodeClient, point: str) -> None:
    plan_fault(node.settings, f"create.{point}", kill=True)
    request = node.next()
    with pytest.raises(CpuosError):
        await client.create(request)
    node.process.wait()
    await node.ready(client)
    if point != "running.after":
        assert node.traces() == []
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


async def test_a_killed_daemon_adopts_its_machine_and_reaches_it(node: Node, client: LocalNodeClient) -> None:
    request = node.next()
    created = await client.create(request)
    assert (created.runtime, created.isolation_detail.split()[0]) == ("microvm", "qemu")
    machine = machine_of(node)
    node.process.kill()
    await node.ready(client)
    assert (await client.get(A)).alive
    assert machine_of(node) == machine
    measured = await client.stats(A)
    assert measured.memory_bytes > 0
    dialled = await DialClient(node.settings.dial_socket).dial(A, request.generation)
    with dialled.socket as guest:  # the agent answers once its kernel has come up
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(guest, dialled.address), 90)
    after = (await client.changes(0)).seq
    os.kill(machine, signal.SIGKILL)
    heard = await client.changes(after, wait_s=60)
    assert [(facts.id, facts.alive, facts.exit_reason) for facts in heard.changes] == [
        (A, False, "its machine stopped")
    ]
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


async def test_machines_are_users_of_their_own_without_rights(node: Node, client: LocalNodeClient) -> None:
    requests = [node.next(), node.next("b")]
    for request in requests:
        await client.create(request)
    users = set()
    for sandbox_id in (A, B):
        pid = machine_of(node, sandbox_id)
        status = status_of(pid)
        users.add(status["Uid"])
        assert len(set(status["Uid"].split())) == 1
        assert int(status["Uid"].split()[0]) >= 0x7000_0000
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        for name in ("net", "mnt", "ipc", "uts"):
            assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
        held = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
        disks = f"{node.settings.node_state_dir}/disks/"
        assert {path for path in held if path.startswith(disks)} == {
            f"{disks}{sandbox_id}/{name}" for name in ("image", "root.image")
        }
    assert len(users) == 2
    for request in requests:
        await client.delete(request.id, generation=request.generation)
    assert node.traces() == []


async def test_the_host_never_looks_into_a_disk_that_a_guest_may_write(node: Node, client: LocalNodeClient) -> None:
    request = node.next()
    await client.create(request)
    folder = node.settings.node_state_dir / "disks" / A
    record = json.loads((folder / "disk.json").read_text())
    assert record["written_by"] == "guest"
    # Something that no ext4 code would accept, and whoever parses it would say so: from now on it is only bytes.
    for name in ("image", "root.image"):
        with (folder / name).open("r+b") as image:
            image.seek(1024)
            image.write(os.urandom(4096))
    marked = {name: _state(folder / name) for name in ("image", "root.image")}
    node.process.kill()
    await node.ready(client)  # readopts
    assert (await client.stats(A)).disk_used_bytes > 0
    assert mounted_of(node, A) == []
    after = (await client.changes(0)).seq
    os.kill(machine_of(node), signal.SIGKILL)
    await client.changes(after, wait_s=60)
    assert not (await client.get(A)).alive
    assert mounted_of(node, A) == []
    assert {name: _state(folder / name)[:2] for name in marked} == {name: state[:2] for name, state in marked.items()}
    await client.delete(A, generation=request.generation)
    assert node.traces() == []


def _state(path: Path) -> tuple[int, int, int]:
    facts = path.stat()
    return facts.st_ino, stat.S_IMODE(facts.st_mode), facts.st_size


@pytest.mark.slow
async def test_fifteen_creates_and_deletes_leave_nothing(node: Node, client: LocalNodeClient) -> None:
    before = _links(), len(os.listdir(f"/proc/{node.process.pid}/fd"))
    for _ in range(15):
        request = node.next()
        await client.create(request)
        await client.delete(A, generation=request.generation)
        assert node.traces() == []
    assert _links() == before[0]
    assert len(os.listdir(f"/proc/{node.process.pid}/fd")) <= before[1] + 8


def _links() -> list[str]:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
