"""Pause, resume, snapshots and clones of real sandboxes with a real agent, and the daemon killed at every step."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cpuos.errors import Conflict, CpuosError, PlatformError
from cpuos.node.client import DialClient, LocalNodeClient
from cpuos.testing.node import fault_is_pending, plan_fault
from cpuos.types.node import NodeSandboxCreate
from guest_calls import GuestCalls
from gvisor_node import FREEZE, A, Node, S, closed_network, emptied_client, gvisor_node

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

COUNTER = "while true; do echo x >> /workspace/count; sleep 0.05; done"


def points(verb: str, steps: list[str]) -> list[str]:
    return [f"{verb}.{step}.{side}" for step in steps for side in ("before", "after")]


PAUSE = points("pause", ["record", "begin", "memory", "root", "sync", "commit", "paused"])
PARK = points("park", ["destroy", "slot", "disk"])
RESUME = points("resume", ["record", "disk", "slot", "start", "check", "running"])
SNAPSHOT = points("snapshot", ["record", "begin", "memory", "root", "disk", "commit", "running"])
CREATE = points("create", ["record", "workdir", "disk", "slot", "start", "check", "running"])


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with gvisor_node() as node:
        yield node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[LocalNodeClient]:
    async with emptied_client(node) as client:
        yield client


class Box:
    """One sandbox and the host side of its agent."""

    def __init__(self, node: Node, client: LocalNodeClient, request: NodeSandboxCreate) -> None:
        self.id, self.generation = request.id, request.generation
        self.client = client
        self.guest = GuestCalls(DialClient(node.settings.dial_socket), request.id, generation=request.generation)

    async def freeze(self) -> dict:
        return await self.guest.freeze(FREEZE)

    async def pause(self):
        return await self.client.pause(self.id, generation=self.generation, freeze=FREEZE)

    async def resume(self):
        return await self.client.resume(self.id, generation=self.generation, network=closed_network())

    async def settle(self) -> None:
        await self.client.settle(self.id, generation=self.generation)

    async def snapshot(self, snapshot: str = S, **values):
        asked = {"generation": self.generation, "snapshot": snapshot, "freeze": FREEZE}
        return await self.client.snapshot(self.id, **(asked | values))

    async def count(self) -> int:
        return int(await self.guest.run("cat /workspace/count 2>/dev/null | wc -l"))  # it may not have begun

    async def counts_on(self) -> None:
        before = await self.count()
        deadline = time.monotonic() + 30
        while await self.count() <= before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def begin(node: Node, client: LocalNodeClient, request: NodeSandboxCreate | None = None) -> Box:
    request = request or node.next()
    await client.create(request)
    box = Box(node, client, request)
    await box.guest.identify()
    return box


async def test_files_and_processes_come_back(node: Node, client: LocalNodeClient) -> None:
    box = await begin(node, client)
    await box.guest.run("echo w > /workspace/w; echo h > /home/user/h; echo e > /etc/e; echo t > /tmp/t; rm /etc/issue")
    await box.guest.start("counter000000000", COUNTER)
    await box.counts_on()
    await box.freeze()
    assert (await box.pause()).paused
    assert {line.split()[0] for line in node.traces()} == {"work", "disk", "record", "image"}
    (workdir_and_disk,) = [set(os.listdir(node.settings.node_state_dir / name)) for name in ("sandboxes",)]
    assert workdir_and_disk == {A}
    facts = await box.resume()
    assert (facts.restored, facts.settled) == ("memory", False)
    hello = await box.guest.identify()
    assert hello["frozen"] is None
    await box.settle()
    await box.counts_on()
    kept = await box.guest.run(
        "cat /workspace/w /home/user/h /etc/e /tmp/t; ls /etc/issue; cat /sys/fs/cgroup/*/pids.max"
    )
    assert kept.split()[:4] == ["w", "h", "e", "t"]
    assert "No such file" in kept
    assert kept.split()[-1] == str(64 + 48)
    assert (await client.stats(A)).processes >= 2
    for _ in range(2):  # and again
        await box.freeze()
        await box.pause()
        await box.resume()
        await box.guest.identify()
        await box.settle()
    await box.counts_on()


async def test_disks_are_let_go_while_later_sandboxes_live(node: Node, client: LocalNodeClient) -> None:
    """A sandbox's processes come with the mounts that they were started among: they must not hold those of others."""
    box = await begin(node, client)
    later = await begin(node, client, node.next("b"))
    await box.freeze()
    await box.pause()
    assert {line.split()[0] for line in node.traces() if A in line} == {"work", "disk", "record", "image"}
    await box.resume()
    await box.guest.identify()
    await box.settle()
    await client.delete(A, generation=box.generation)
    assert not [line for line in node.traces() if A in line]
    assert (await later.guest.run("echo lives")) == "lives\n"


async def test_limits_hold_after_a_resume(node: Node, client: LocalNodeClient) -> None:
    box = await begin(node, client)
    await box.freeze()
    await box.pause()
    await box.resume()
    await box.guest.identify()
    await box.settle()
    hog = '$x .= "x" x 10_000_000, select(undef, undef, undef, 0.02) for 1..60; print 6 * 7'
    said = await box.guest.run(f"perl -e '{hog}'; echo ended")
    assert "42" not in said
    assert "ended" in said, "the hog is killed, not the sandbox"
    bomb = "while (defined($p = fork)) { if (!$p) { sleep 20; exit } last if ++$n > 300 } print $n"
    assert 30 < int(await box.guest.run(f"perl -e '{bomb}'; pkill -9 perl")) <= 64 + 48
    assert (await client.get(A)).alive


async def test_snapshot_then_three_that_go_on_from_it(node: Node, client: LocalNodeClient) -> None:
    box = await begin(node, client)
    await box.guest.run("echo w > /workspace/w; echo e > /etc/e")
    await box.guest.start("counter000000000", COUNTER)
    await box.counts_on()
    await box.freeze()
    made = await box.snapshot()
    assert made.memory
    await box.guest.identify()
    await box.counts_on()
    await box.guest.run("echo later > /workspace/w")
    clones = [await begin(node, client, node.next(letter, snapshot=S, hostname=f"box-{letter}")) for letter in "bcd"]
    keys = set()
    for clone in clones:
        await clone.counts_on()
        await clone.guest.run(f"echo {clone.id} > /workspace/own")
        said = await clone.guest.run("cat /workspace/w /etc/e; hostname; cat /etc/machine-id")
        assert said.split()[:3] == ["w", "e", f"box-{clone.id[0]}"]
        keys.add(said.split()[3] if len(said.split()) > 3 else clone.id)
        assert (await client.stats(clone.id)).processes >= 2
    assert len(keys) == 3
    assert [(await clone.guest.run("cat /workspace/own")).strip() for clone in clones] == [c.id for c in clones]
    # A clone is paused, resumed and cloned itself.
    last = clones[-1]
    await last.freeze()
    await last.pause()
    await last.snapshot("t" * 20, freeze=None)
    await last.resume()
    await last.guest.identify()
    await last.settle()
    await last.counts_on()
    await client.delete_snapshot(S)
    again = await begin(node, client, node.next("e", snapshot="t" * 20))
    await again.counts_on()
    assert (await client.stats(again.id)).processes >= 2
    cold = await begin(node, client, node.next("f", snapshot="t" * 20, warm=False))
    assert (await cold.guest.run("cat /workspace/own")).strip() == last.id


async def test_what_is_left_of_one_that_died_goes_on(node: Node, client: LocalNodeClient) -> None:
    box = await begin(node, client)
    await box.guest.run("echo e > /etc/e; rm /etc/issue")
    await box.freeze()
    await box.pause()
    await box.resume()
    await box.guest.identify()
    await box.settle()
    await box.guest.run("echo k > /etc/k")
    await client.keep_root(A, generation=box.generation)
    await box.guest.run("echo w > /workspace/w; echo later > /etc/later")
    after = (await client.changes(0)).seq
    journal = node.settings.node_state_dir / "journal" / f"{A}.json"
    os.kill(json.loads(journal.read_text())["process"]["pid"], signal.SIGKILL)
    heard = await client.changes(after, wait_s=10)
    assert [facts.alive for facts in heard.changes] == [False]
    deadline = time.monotonic() + 10
    while not json.loads(journal.read_text())["ended"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert {line.split()[0] for line in node.traces()} == {"disk", "image"}
    made = await box.snapshot(freeze=None, memory=False)
    assert made.root_at < made.created_at
    await client.delete(A, generation=box.generation)
    again = await begin(node, client, node.next(snapshot=S))
    assert (await client.get(A)).restored == "root"
    said = await again.guest.run("cat /workspace/w /etc/e /etc/k; ls /etc/issue /etc/later")
    assert said.split()[:3] == ["w", "e", "k"]
    assert said.count("No such file") == 2


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("point", [*PAUSE, *PARK])
async def test_a_pause_that_stops_anywhere(node: Node, client: LocalNodeClient, point: str, kill: bool) -> None:
    box = await begin(node, client)
    await box.guest.start("counter000000000", COUNTER)
    await box.counts_on()
    await box.freeze()
    plan_fault(node.settings, point, kill=kill)
    try:
        await box.pause()
    except CpuosError:
        pass
    assert not fault_is_pending(node.settings)
    if kill:
        node.process.wait()
        await node.ready(client)
    facts = await client.get(A)
    assert facts.alive
    if point.startswith("park") or (kill and point == "pause.paused.after"):
        assert facts.paused
    elif not (kill and point.startswith("pause.paused")):
        assert not facts.paused
    if point == "pause.record.before":  # nothing says that it was frozen: the freeze is repeated
        await box.pause()
        facts = await client.get(A)
    if facts.paused:
        await box.resume()
    await box.guest.identify()
    await box.counts_on()


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("point", RESUME)
async def test_a_resume_that_stops_anywhere(node: Node, client: LocalNodeClient, point: str, kill: bool) -> None:
    box = await begin(node, client)
    await box.guest.start("counter000000000", COUNTER)
    await box.counts_on()
    await box.freeze()
    await box.pause()
    plan_fault(node.settings, point, kill=kill)
    with pytest.raises(CpuosError):
        await box.resume()
    assert not fault_is_pending(node.settings)
    if kill:
        node.process.wait()
        await node.ready(client)
    facts = await client.get(A)
    assert facts.paused or (kill and point == "resume.running.after")
    if facts.paused:
        assert {line.split()[0] for line in node.traces()} == {"work", "disk", "record", "image"}
    await box.resume()
    await box.guest.identify()
    await box.settle()
    await box.counts_on()


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("point", SNAPSHOT)
async def test_a_snapshot_that_stops_anywhere(node: Node, client: LocalNodeClient, point: str, kill: bool) -> None:
    box = await begin(node, client)
    await box.guest.start("counter000000000", COUNTER)
    await box.counts_on()
    await box.freeze()
    plan_fault(node.settings, point, kill=kill)
    with pytest.raises(CpuosError):
        await box.snapshot()
    assert not fault_is_pending(node.settings)
    if kill:
        node.process.wait()
        await node.ready(client)
    assert (await client.get(A)).alive
    await box.snapshot()
    if (await client.snapshots())[0].incarnation == (await client.get(A)).incarnation:
        await box.guest.identify()
        await box.counts_on()
    clone = await begin(node, client, node.next("b", snapshot=S))
    await clone.counts_on()


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("point", CREATE)
async def test_a_create_from_a_snapshot_that_stops_anywhere(
    node: Node, client: LocalNodeClient, point: str, kill: bool
) -> None:
    box = await begin(node, client)
    await box.guest.run("echo w > /workspace/w")
    await box.freeze()
    await box.snapshot()
    await client.delete(A, generation=box.generation)
    plan_fault(node.settings, point, kill=kill)
    request = node.next("b", snapshot=S)
    with pytest.raises(CpuosError):
        await client.create(request)
    if kill:
        node.process.wait()
        await node.ready(client)
    if not (kill and point == "create.running.after"):
        assert node.traces() == []
    clone = await begin(node, client, request)
    assert await clone.guest.run("cat /workspace/w") == "w\n"


async def test_a_flipped_bit_is_found_and_the_files_come_back(node: Node, client: LocalNodeClient) -> None:
    box = await begin(node, client)
    await box.guest.run("echo w > /workspace/w; echo e > /etc/e; rm /etc/issue")
    await box.guest.start("counter000000000", COUNTER)
    await box.freeze()
    await box.snapshot()
    await box.guest.identify()
    await box.freeze()
    await box.pause()
    store = node.settings.node_state_dir / "snapshots"
    for name in (S, f"pause-{A}"):
        await _hashed(store / name)
        _flip(store / name / "memory" / "pages.img")
    with pytest.raises(PlatformError) as caught:
        await client.create(node.next("b", snapshot=S))
    assert caught.value.code == "snapshot_damaged"
    assert "pages.img" in caught.value.why
    facts = await box.resume()
    assert facts.restored == "root"
    await box.guest.identify()
    await box.settle()
    assert (await box.guest.run("cat /workspace/w /etc/e; ls /etc/issue; pgrep -c sleep")).split()[:2] == ["w", "e"]
    await box.freeze()
    await box.pause()
    assert (await box.resume()).restored == "memory"
    await box.guest.identify()
    cold = await begin(node, client, node.next("b", snapshot=S, warm=False))
    assert (await client.get(cold.id)).restored == "root"
    said = await cold.guest.run("cat /workspace/w /etc/e; ls /etc/issue")
    assert said.split()[:2] == ["w", "e"]
    assert "No such file" in said


async def test_both_damaged_is_an_error_and_it_stays_paused(node: Node, client: LocalNodeClient) -> None:
    box = await begin(node, client)
    await box.guest.run("head -c 1M /dev/urandom > /opt/f")
    await box.freeze()
    await box.pause()
    image = node.settings.node_state_dir / "snapshots" / f"pause-{A}"
    await _hashed(image)
    for part in ("memory", "root"):
        _flip(image / part / "pages.img")
    with pytest.raises(PlatformError) as caught:
        await box.resume()
    assert caught.value.code == "snapshot_damaged"
    assert (await client.get(A)).paused
    assert {line.split()[0] for line in node.traces()} == {"work", "disk", "record", "image"}
    for part in ("memory", "root"):
        _flip(image / part / "pages.img")
    assert (await box.resume()).restored == "memory"
    await box.guest.identify()


async def test_a_foreign_or_older_image_is_refused(node: Node, client: LocalNodeClient) -> None:
    box = await begin(node, client)
    await box.freeze()
    await box.snapshot()
    await client.delete(A, generation=box.generation)
    folder = node.settings.node_state_dir / "snapshots" / S
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"memory_mib":256', '"memory_mib":512'))
    with pytest.raises(PlatformError) as caught:
        await client.create(node.next("b", snapshot=S, memory_mib=512))
    assert caught.value.code == "snapshot_damaged"
    manifest.write_text(text)
    (folder / "memory" / "checkpoint.img").write_bytes(b"")
    with pytest.raises(PlatformError) as caught:
        await client.create(node.next("b", snapshot=S))
    assert caught.value.code == "snapshot_damaged"
    _resign(node, text.replace("v0.0.0-20260905035102", "v0.0.0-20250101000000"))
    with pytest.raises(CpuosError) as caught:
        await client.create(node.next("b", snapshot=S))
    assert caught.value.code in ("snapshot_incompatible", "snapshot_damaged")
    shutil.rmtree(folder)


async def test_a_full_data_volume_refuses_and_all_go_on() -> None:
    with gvisor_node(volume_mib=512) as node:
        async with LocalNodeClient(node.settings.node_socket) as client:
            await node.ready(client)
            box, other = await begin(node, client), await begin(node, client, node.next("b"))
            await box.guest.run("head -c 40M /dev/urandom > /opt/f; head -c 30M /dev/urandom > /workspace/f; sync")
            await other.guest.start("counter000000000", COUNTER)
            filler = node.settings.state_dir / "filler"
            _fill(filler, leave_mib=100)
            for verb in (box.pause, box.snapshot):
                await box.freeze()
                with pytest.raises(CpuosError) as caught:
                    await verb()
                assert caught.value.code == "capacity_exceeded"
                assert "no room" in caught.value.why
                facts = await client.get(A)
                assert (facts.alive, facts.paused) == (True, False)
                await box.guest.identify()
                assert await box.guest.run("sha256sum < /opt/f > /workspace/s; sync; echo $?") == "0\n"
            await other.counts_on()
            assert await client.snapshots() == []
            assert os.listdir(node.settings.node_state_dir / "snapshots") == []
            filler.unlink()
            await box.freeze()
            assert (await box.pause()).paused
            await box.resume()
            await box.guest.identify()
            for one in (box, other):
                await client.delete(one.id, generation=one.generation)


def _fill(path: Path, *, leave_mib: int) -> None:
    status = os.statvfs(path.parent)
    size = status.f_bavail * status.f_frsize - (leave_mib << 20)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


async def _hashed(image: Path) -> None:
    deadline = time.monotonic() + 30
    while not (image / "digests.json").exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def _flip(path: Path) -> None:
    offset = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def _resign(node: Node, text: str) -> None:
    from cpuos.node.images import ImageStore

    store = ImageStore(node.settings.node_state_dir / "snapshots")
    (store.path(S) / "manifest.json").write_text(text)
    (store.path(S) / "manifest.mac").write_text(store._sign(b"manifest", text.encode()))


async def test_a_snapshot_that_was_not_frozen_needs_no_thaw(node: Node, client: LocalNodeClient) -> None:
    box = await begin(node, client)
    await box.guest.run("echo w > /workspace/w")
    made = await box.snapshot(freeze=None, memory=False)
    assert not made.memory
    await box.guest.run("true")
    with pytest.raises(Conflict):
        await client.snapshot(A, generation=box.generation - 1, snapshot=S, freeze=FREEZE)
