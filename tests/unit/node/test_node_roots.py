"""Roots that are saved now and then: when, how often at most, and what is there of them when a sandbox dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from datetime import UTC, datetime, timedelta

import pytest

from cpuos.errors import NotFound, PlatformError
from cpuos.node import syscalls
from cpuos.node.images import root_name
from cpuos.runtimes.base import RuntimeStats
from cpuos.testing.faults import assert_nothing_left
from cpuos.testing.node import fake_node
from cpuos.testing.waiting import until

A, S = "a" * 20, "s" * 20
FREEZE = "f" * 32


class Clock:
    def __init__(self, node) -> None:
        self.now = datetime.now(UTC)
        node.service.ledger.clock = self

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock(node) -> Clock:
    return Clock(node)


@pytest.fixture
def cpu(node, monkeypatch) -> list[float]:
    """What a sandbox has used of the processors: its last number."""
    used = [0.0]

    async def stats(sandbox_id: str) -> RuntimeStats:
        return RuntimeStats(memory_bytes=0, cpu_seconds=used[-1], processes=1)

    monkeypatch.setattr(node.parts.runtimes["fake"], "stats", stats)
    return used


@pytest.fixture
def saves(node, monkeypatch) -> list[str]:
    made: list[str] = []
    save_root = node.parts.runtimes["fake"].save_root

    async def count(sandbox_id: str, *, image) -> None:
        made.append(sandbox_id)
        await save_root(sandbox_id, image=image)

    monkeypatch.setattr(node.parts.runtimes["fake"], "save_root", count)
    return made


def write_root(node, text: str, name: str = "note") -> None:
    (node.parts.runtimes["fake"]._folder / A / "root" / name).write_text(text)


async def test_a_root_is_saved_after_its_interval_and_no_sooner(node, asking, clock, cpu, saves):
    await node.client.create(asking(root_interval_s=60))
    for advance, expected in ((0, 0), (59, 0), (2, 1), (30, 1), (31, 2)):
        clock.advance(advance)
        cpu.append(cpu[-1] + 1)
        await node.service.roots.round()
        assert len(saves) == expected, advance


async def test_no_root_is_saved_where_none_is_asked_for(node, asking, clock, cpu, saves):
    await node.client.create(asking(root_interval_s=0))
    clock.advance(100_000)
    assert await node.service.roots.round() == []
    assert saves == []


async def test_the_nodes_interval_is_that_of_who_says_nothing(settings, asking):
    chosen = settings.model_copy(update={"root_checkpoint_interval_s": 60})
    async with fake_node(chosen) as node:
        clock = Clock(node)
        await node.client.create(asking())
        await node.client.create(asking("b", root_interval_s=600))
        clock.advance(61)
        assert await node.service.roots.round() == [A]
        for letter in "ab":
            await node.client.delete(letter * 20, generation=1)


async def test_one_in_which_nothing_happens_is_passed_over_but_not_for_ever(node, asking, clock, cpu, saves):
    await node.client.create(asking(root_interval_s=60))
    clock.advance(61)
    await node.service.roots.round()
    for _ in range(12):
        clock.advance(61)
        cpu.append(cpu[-1] + 0.02)  # what an idle one takes
        await node.service.roots.round()
    assert len(saves) == 1
    clock.advance(61)
    await node.service.roots.round()
    assert len(saves) == 2
    clock.advance(61)
    cpu.append(cpu[-1] + 1)
    await node.service.roots.round()
    assert len(saves) == 3


async def test_a_save_that_takes_long_comes_seldom(node, asking, clock, cpu, saves, monkeypatch):
    save_root = node.parts.runtimes["fake"].save_root

    async def slow(sandbox_id: str, *, image) -> None:
        clock.advance(10)
        await save_root(sandbox_id, image=image)

    monkeypatch.setattr(node.parts.runtimes["fake"], "save_root", slow)
    await node.client.create(asking(root_interval_s=60))
    clock.advance(61)
    await node.service.roots.round()
    cpu.append(5.0)
    clock.advance(480)
    await node.service.roots.round()
    assert len(saves) == 1
    clock.advance(21)
    await node.service.roots.round()
    assert len(saves) == 2


async def test_paused_ones_are_left_alone_and_begin_anew_when_they_run(node, asking, clock, cpu, saves):
    await node.client.create(asking(root_interval_s=60))
    await node.client.pause(A, generation=1, freeze=FREEZE)
    before = len(saves)
    clock.advance(1000)
    assert await node.service.roots.round() == []
    policy = node.service.ledger.find(A).policy
    await node.client.resume(A, generation=1, network=policy)
    cpu.append(9.0)
    assert await node.service.roots.round() == []  # until it has answered nothing is known of it
    await node.client.settle(A, generation=1)
    clock.advance(59)
    assert await node.service.roots.round() == []
    clock.advance(2)
    assert await node.service.roots.round() == [A]
    assert len(saves) == before + 1


async def test_a_failure_is_tried_again_after_the_interval(node, asking, clock, cpu, monkeypatch):
    await node.client.create(asking(root_interval_s=60))
    save_root = node.parts.runtimes["fake"].save_root
    write_root(node, "first")
    clock.advance(61)
    assert await node.service.roots.round() == [A]

    async def fail(sandbox_id: str, *, image) -> None:
        raise PlatformError("cannot save it", "no")

    monkeypatch.setattr(node.parts.runtimes["fake"], "save_root", fail)
    cpu.append(9.0)
    write_root(node, "second")
    clock.advance(61)
    assert await node.service.roots.round() == []
    assert await node.service.roots.round() == []
    images = node.service._assembly.images
    assert (images.path(root_name(A)) / "root" / "note").read_text() == "first"
    assert not images.part(root_name(A)).exists()
    monkeypatch.setattr(node.parts.runtimes["fake"], "save_root", save_root)
    clock.advance(61)
    assert await node.service.roots.round() == [A]
    assert (images.path(root_name(A)) / "root" / "note").read_text() == "second"


async def test_what_was_saved_last_is_what_a_dead_ones_files_begin_with(node, settings, asking, clock, cpu):
    await node.client.create(asking(root_interval_s=60))
    write_root(node, "saved")
    clock.advance(61)
    saved_at = clock.now
    assert await node.service.roots.round() == [A]
    write_root(node, "later")
    workspace = node.parts.disks.path(A) / "workspace"
    (workspace / "work").write_text("all of it")
    await kill(node)
    clock.advance(30)
    snapshot = await node.client.snapshot(A, generation=1, snapshot=S, memory=False)
    assert (snapshot.root, snapshot.root_at) == (True, saved_at)
    await node.client.delete(A, generation=1)
    facts = await node.client.create(asking(generation=2, snapshot=S, warm=False))
    assert (facts.restored, facts.restored_at, facts.generation) == ("root", saved_at, 2)
    assert (node.parts.runtimes["fake"]._folder / A / "root" / "note").read_text() == "saved"
    assert (workspace / "work").read_text() == "all of it"
    await node.client.delete_snapshot(S)
    await kill(node)  # before its root was saved again
    again = await node.client.snapshot(A, generation=2, snapshot=S, memory=False)
    assert (again.root, again.root_at, again.generation) == (True, saved_at, 2)
    await node.client.delete(A, generation=2)
    facts = await node.client.create(asking(generation=3, snapshot=S, warm=False))
    assert (facts.restored, facts.restored_at) == ("root", saved_at)
    await node.client.delete_snapshot(S)
    await node.client.delete(A, generation=3)
    await assert_nothing_left(settings, node.parts)


async def test_a_save_that_goes_on_does_not_hold_up_a_delete(node, settings, asking, clock, cpu, monkeypatch):
    await node.client.create(asking(root_interval_s=60))
    images, committed = node.service._assembly.images, []
    begun, go_on = asyncio.Event(), asyncio.Event()
    save_root = node.parts.runtimes["fake"].save_root

    async def held(sandbox_id: str, *, image) -> None:
        begun.set()
        await go_on.wait()
        await save_root(sandbox_id, image=image)

    monkeypatch.setattr(node.parts.runtimes["fake"], "save_root", held)
    monkeypatch.setattr(images, "commit", lambda manifest: committed.append(manifest.name))
    clock.advance(61)
    round_ = asyncio.create_task(node.service.roots.round())
    await begun.wait()
    deleting = asyncio.create_task(node.client.delete(A, generation=1))
    await until(lambda: node.service.roots._saving[A].cancelling())
    go_on.set()
    await deleting
    assert await round_ == []
    assert committed == []
    with pytest.raises(NotFound):
        await node.client.get(A)
    await assert_nothing_left(settings, node.parts)


def test_two_folders_change_their_names_at_once(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "is").write_text(name)
    syscalls.exchange(tmp_path / "a", tmp_path / "b")
    assert [(tmp_path / name / "is").read_text() for name in "ab"] == ["b", "a"]
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(OSError, match="No such file"):
        syscalls.exchange(tmp_path / "a", tmp_path / "b")


async def kill(node) -> None:
    record = node.service.ledger.find(A)
    os.kill(record.process.pid, signal.SIGKILL)
    await until(lambda: node.service.ledger.find(A).ended)
