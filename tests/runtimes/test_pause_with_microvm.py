"""Machines that are saved and taken up, at the node: no daemon's death leaves one standing still, no copy can reach the
image it came from, and nothing is taken up by another version. None of it needs the guest to have come up."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cpuos.errors import Conflict, CpuosError, InvalidRequest
from cpuos.node.client import LocalNodeClient
from cpuos.runtimes.microvm.memory import HELD_AS
from cpuos.runtimes.microvm.qemu import ask
from cpuos.testing.node import fault_is_pending, plan_fault
from cpuos.testing.waiting import until
from cpuos.types.node import NodeSandboxCreate
from gvisor_node import FREEZE, A, Node, S, closed_network, emptied_client, gvisor_node

pytestmark = [pytest.mark.microvm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with gvisor_node(runtime="microvm") as node:
        yield node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[LocalNodeClient]:
    async with emptied_client(node) as client:
        yield client


async def pause(client: LocalNodeClient, request: NodeSandboxCreate):
    return await client.pause(request.id, generation=request.generation, freeze=FREEZE)


async def resume(client: LocalNodeClient, request: NodeSandboxCreate):
    return await client.resume(request.id, generation=request.generation, network=closed_network())


async def snapshot(client: LocalNodeClient, request: NodeSandboxCreate, **values):
    asked = {"generation": request.generation, "snapshot": S, "freeze": FREEZE}
    return await client.snapshot(request.id, **(asked | values))


def machine_of(node: Node, sandbox_id: str = A) -> int:
    path = node.settings.node_state_dir / "journal" / f"{sandbox_id}.json"
    return int(json.loads(path.read_text())["process"]["pid"])


def control_of(node: Node, sandbox_id: str = A) -> Path:
    (path,) = node.settings.run_dir.rglob(f"{sandbox_id}/control")
    return path


async def state_of(node: Node, sandbox_id: str = A) -> str:
    return str((await ask(control_of(node, sandbox_id), "query-status", timeout_s=30))["status"])


async def is_paused(client: LocalNodeClient) -> bool:
    return (await client.get(A)).paused


async def is_dead(client: LocalNodeClient) -> bool:
    return not (await client.get(A)).alive


async def runs(node: Node) -> bool:
    return await state_of(node) == "running"


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def memory_of(pid: int) -> tuple[str, int]:
    """How a machine maps what it was handed, and the flags of that file."""
    held = os.stat(f"/proc/{pid}/fd/{HELD_AS}")
    fields = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    (rights,) = {one[1] for one in fields if int(one[4]) == held.st_ino and one[3] != "00:00"}
    flags = dict(line.split(":\t") for line in Path(f"/proc/{pid}/fdinfo/{HELD_AS}").read_text().splitlines()[:3])
    return rights, int(flags["flags"], 8) & os.O_ACCMODE


@pytest.mark.parametrize("kill", [False, True])
async def test_a_save_that_came_to_nothing_leaves_it_running(node: Node, client: LocalNodeClient, kill: bool) -> None:
    request = node.next()
    await client.create(request)
    plan_fault(node.settings, "pause.commit.before", kill=kill)
    with pytest.raises(CpuosError):
        await pause(client, request)
    assert not fault_is_pending(node.settings)
    if kill:
        node.process.wait()
    await node.ready(client)
    facts = await client.get(A)
    assert (facts.alive, facts.paused) == (True, False)
    assert await state_of(node) == "running"
    assert os.listdir(node.settings.node_state_dir / "snapshots") == []


async def test_one_that_a_dead_daemon_left_standing_still_goes_on(node: Node, client: LocalNodeClient) -> None:
    await client.create(node.next())
    node.process.kill()
    node.process.wait()
    await ask(control_of(node), "stop", timeout_s=30)
    assert await state_of(node) == "paused"
    await node.ready(client)
    await until(lambda: runs(node))


async def test_it_is_paused_and_taken_up_over_the_daemons_death(node: Node, client: LocalNodeClient) -> None:
    request = node.next()
    await client.create(request)
    first = machine_of(node)
    assert memory_of(first) == ("rw-s", os.O_RDWR)
    assert (await pause(client, request)).paused
    assert not is_there(first)
    assert {line.split()[0] for line in node.traces()} == {"work", "disk", "record", "image"}
    node.process.kill()
    await node.ready(client)
    assert (await client.get(A)).paused
    facts = await resume(client, request)
    assert (facts.alive, facts.restored, facts.settled) == (True, "memory", False)
    assert await state_of(node) == "running"
    node.process.kill()
    await node.ready(client)
    assert (await client.get(A)).alive
    # Nobody has said that it answers: without its process it is paused as before.
    os.kill(machine_of(node), signal.SIGKILL)
    await until(lambda: is_paused(client))
    assert (await resume(client, request)).restored == "memory"
    await client.settle(A, generation=request.generation)
    assert os.listdir(node.settings.node_state_dir / "snapshots") == []
    os.kill(machine_of(node), signal.SIGKILL)
    await until(lambda: is_dead(client))


async def test_copies_share_an_image_that_none_can_write(node: Node, client: LocalNodeClient) -> None:
    request = node.next()
    await client.create(request)
    made = await snapshot(client, request)
    assert (made.memory, made.root, made.runtime) == (True, True, "microvm")
    assert made.runtime_version.startswith("qemu ")
    image = node.settings.node_state_dir / "snapshots" / S / "memory" / "ram"
    before = image.read_bytes()
    copies = [node.next(letter, snapshot=S, warm=True) for letter in "bc"]
    created = await asyncio.gather(*(client.create(copy) for copy in copies))
    assert [facts.restored for facts in created] == ["memory"] * 2
    for copy in copies:
        pid = machine_of(node, copy.id)
        assert os.stat(f"/proc/{pid}/fd/{HELD_AS}").st_ino == image.stat().st_ino
        assert memory_of(pid) == ("rw-p", os.O_RDONLY)
        assert await state_of(node, copy.id) == "running"
    assert len({os.stat(f"/proc/{machine_of(node, one)}").st_uid for one in (A, "b" * 20, "c" * 20)}) == 3
    # A copy that is saved has its memory in what QEMU writes, and is taken up from there.
    (copy, other) = copies
    assert (await pause(client, copy)).paused
    assert not (image.parent.parent.parent / f"pause-{copy.id}" / "memory" / "ram").exists()
    assert (await resume(client, copy)).restored == "memory"
    assert memory_of(machine_of(node, copy.id)) == ("rw-s", os.O_RDWR)
    await client.delete(other.id, generation=other.generation)
    assert image.read_bytes() == before


async def test_files_alone_are_of_a_frozen_one_or_a_dead_one(node: Node, client: LocalNodeClient) -> None:
    request = node.next()
    await client.create(request)
    with pytest.raises(InvalidRequest, match="only while they are frozen"):
        await snapshot(client, request, freeze=None, memory=False)
    os.kill(machine_of(node), signal.SIGKILL)
    await until(lambda: is_dead(client))
    made = await snapshot(client, request, freeze=None, memory=False)
    assert (made.memory, made.root) == (False, True)
    copy = node.next("b", snapshot=S)
    assert (await client.create(copy)).restored == "root"
    folder = node.settings.node_state_dir / "disks"
    for name in ("image", "root.image"):
        assert (folder / copy.id / name).stat().st_ino != (folder / A / name).stat().st_ino


async def test_another_kernel_takes_the_files_alone(node: Node, client: LocalNodeClient, tmp_path: Path) -> None:
    """As another QEMU or another command line: what is not the same machine is not taken up."""
    request = node.next()
    await client.create(request)
    await snapshot(client, request)
    assert (await pause(client, request)).paused
    settings, other = node.settings, tmp_path / "data"
    other.mkdir()
    for path in settings.data_dir.iterdir():
        (other / path.name).symlink_to(path)
    (other / "microvm").unlink()
    shutil.copytree(settings.microvm_dir, other / "microvm")
    manifest = json.loads((other / "microvm" / "manifest.json").read_text())
    (other / "microvm" / "manifest.json").write_text(json.dumps(manifest | {"initrd": "0" * 64}))
    node.process.kill()
    node.process.wait()
    node.settings = settings.model_copy(update={"data_dir": other})
    try:
        await node.ready(client)
        await client.facts()
        with pytest.raises(Conflict, match=r"it was made by microvm qemu .*, and this node has qemu") as caught:
            await client.create(node.next("b", snapshot=S, warm=True))
        assert caught.value.code == "snapshot_incompatible"
        facts = await resume(client, request)
        assert (facts.alive, facts.restored) == (True, "root")
        await client.delete(A, generation=request.generation)
    finally:
        node.process.kill()
        node.process.wait()
        node.settings = settings


@pytest.mark.slow
async def test_many_pauses_leave_nothing(node: Node, client: LocalNodeClient) -> None:
    request = node.next()
    await client.create(request)
    before = len(os.listdir(f"/proc/{node.process.pid}/fd"))
    for _ in range(15):
        assert (await pause(client, request)).paused
        await resume(client, request)
        await client.settle(A, generation=request.generation)
    assert len(os.listdir(f"/proc/{node.process.pid}/fd")) <= before + 8
