"""Usage: totals that only rise, over pauses and restarts of the node."""

from __future__ import annotations

import os
import time

from cpuos.node.journal import Stage
from cpuos.runtimes.base import Process
from cpuos.testing.node import fake_node
from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy, PolicyLayer
from cpuos.types.node import SandboxUsage, Usage

A, B = "a" * 20, "b" * 20
POLICY = EffectivePolicy(version=1, layers=[PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))])


async def usage(node, sandbox_id: str = A) -> SandboxUsage | None:
    return {one.id: one for one in await node.client.usage()}.get(sandbox_id)


def set_cpu(node, monkeypatch, **seconds: float) -> None:
    """What control groups count, by the first letter of the sandbox."""

    def read(sandbox_id: str) -> float:
        if sandbox_id[0] not in seconds:
            raise FileNotFoundError(sandbox_id)
        return seconds[sandbox_id[0]]

    monkeypatch.setattr(node.parts.runtimes["fake"], "cpu_seconds", read)


def is_below(one: SandboxUsage, other: SandboxUsage) -> bool:
    return one.ran_s < other.ran_s and one.cpu_seconds <= other.cpu_seconds and one.sent_bytes <= other.sent_bytes


async def test_all_that_run_are_measured(node, asking, monkeypatch):
    assert await node.client.usage() == []
    await node.client.create(asking("a", generation=3))
    await node.client.create(asking("b"))
    set_cpu(node, monkeypatch, a=1.5, b=2.5)
    node.parts.slots.sent[B] = 77
    first, second = await usage(node, A), await usage(node, B)
    assert (first.generation, first.cpu_seconds, first.sent_bytes) == (3, 1.5, 0)
    assert (second.generation, second.cpu_seconds, second.sent_bytes) == (1, 2.5, 77)
    assert 0 <= first.ran_s < 60
    assert is_below(first, await usage(node, A))


async def test_one_that_ends_meanwhile_is_left_out(node, asking, monkeypatch):
    await node.client.create(asking("a"))
    await node.client.create(asking("b"))
    set_cpu(node, monkeypatch, b=1.0)
    assert [one.id for one in await node.client.usage()] == [B]


async def test_a_pause_keeps_what_was_used_and_its_time_stands_still(node, asking, monkeypatch):
    await node.client.create(asking())
    set_cpu(node, monkeypatch, a=5.0)
    node.parts.slots.sent[A] = 1000
    before = await usage(node)
    await node.client.pause(A, generation=1, freeze="f" * 32)
    kept = node.service.ledger.find(A).used
    assert (kept.cpu_seconds, kept.sent_bytes) == (5.0, 1000)
    assert before.ran_s <= kept.ran_s < before.ran_s + 30
    assert await node.client.usage() == []
    await node.client.resume(A, generation=1, network=POLICY)
    set_cpu(node, monkeypatch, a=0.25)
    node.parts.slots.sent[A] = 10
    after = await usage(node)
    assert (after.cpu_seconds, after.sent_bytes) == (5.25, 1010)
    assert after.ran_s >= kept.ran_s
    await node.client.repause(A, generation=1)  # what its taking up used counts too
    assert node.service.ledger.find(A).used.cpu_seconds == 5.25


async def test_a_pause_that_fails_counts_nothing_twice(node, asking, monkeypatch):
    await node.client.create(asking())
    set_cpu(node, monkeypatch, a=5.0)
    await node.client.pause(A, generation=1, freeze="f" * 32)
    await node.client.resume(A, generation=1, network=POLICY)
    await node.client.settle(A, generation=1)
    record = node.service.ledger.find(A)
    await node.service.ledger.keep(record.becomes(Stage.PAUSING))
    await node.service.sweep()  # its pause was cut short: it runs on
    assert node.service.ledger.find(A).stage is Stage.RUNNING
    assert (await usage(node)).cpu_seconds == 10.0


async def test_what_cannot_be_read_any_more_stops_no_pause(node, asking, monkeypatch):
    await node.client.create(asking())
    set_cpu(node, monkeypatch)
    await node.client.pause(A, generation=1, freeze="f" * 32)
    assert node.service.ledger.find(A).used == Usage()


async def test_a_restarted_node_goes_on_counting(settings, asking):
    async with fake_node(settings) as node:
        await node.client.create(asking())
        before = await usage(node)
    async with fake_node(settings) as node:
        assert is_below(before, await usage(node))


async def test_its_own_time_begins_with_its_process(node, asking, monkeypatch):
    await node.client.create(asking())
    record = node.service.ledger.find(A)
    ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 100) * os.sysconf("SC_CLK_TCK"))
    await node.service.ledger.keep(
        record.becomes(record.stage, process=Process(pid=record.process.pid, start_time=ticks))
    )
    assert 99 < (await usage(node)).ran_s < 130
