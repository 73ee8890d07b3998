"""A fault at every step of every verb: nothing is left, and the verb can be repeated."""

from __future__ import annotations

import pytest

from cpuos.errors import CpuosError, PlatformError
from cpuos.node.journal import Stage
from cpuos.testing.faults import Faults, assert_nothing_left
from cpuos.testing.node import fake_node

TOGETHER = ["record", "workdir", "disk", "slot"]
CREATE_STEPS = [*TOGETHER, "start", "running"]
DELETE_STEPS = ["record", "image", "destroy", "slot", "disk", "workdir", "gone"]


def points(verb: str, steps: list[str]) -> list[str]:
    return [f"{verb}.{step}.{side}" for step in steps for side in ("before", "after")]


async def test_the_lists_above_name_every_step(settings, asking):
    faults = Faults()
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking())
        await node.client.delete("a" * 20, generation=1)
    apart = 2 * len(TOGETHER)
    assert sorted(faults.seen[:apart]) == sorted(points("create", TOGETHER))
    assert faults.seen[apart:] == points("create", ["start", "running"]) + points("delete", DELETE_STEPS)


@pytest.mark.parametrize("point", points("create", CREATE_STEPS))
async def test_failed_create_leaves_nothing_and_repeats(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        with pytest.raises(PlatformError, match="cannot create sandbox"):
            await node.client.create(asking())
        assert not faults.pending
        await assert_nothing_left(settings, node.parts)
        assert await node.client.list() == []
        assert (await node.client.create(asking())).alive
        await node.client.delete("a" * 20, generation=1)
        await assert_nothing_left(settings, node.parts)


@pytest.mark.parametrize("step", CREATE_STEPS)
async def test_failed_undo_is_tried_again(settings, asking, step):
    faults = Faults("create.running.before", f"create.{step}.undo")
    async with fake_node(settings, checkpoint=faults) as node:
        with pytest.raises(CpuosError):
            await node.client.create(asking())
        assert not faults.pending
        await node.service.sweep()
        await assert_nothing_left(settings, node.parts)


@pytest.mark.parametrize("point", points("delete", DELETE_STEPS))
async def test_failed_delete_is_finished_by_its_repeat(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking())
        with pytest.raises(PlatformError, match="cannot delete sandbox"):
            await node.client.delete("a" * 20, generation=1)
        await node.client.delete("a" * 20, generation=1)
        await assert_nothing_left(settings, node.parts)
        assert await node.client.list() == []


@pytest.mark.parametrize("point", points("end", ["image", "destroy", "slot", "disk", "workdir"]))
async def test_failed_clean_up_of_a_dead_sandbox_is_tried_again(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking())
        after = (await node.client.changes(0)).seq
        await node.parts.runtimes["fake"].destroy("a" * 20)
        heard = await node.client.changes(after, wait_s=5)
        assert [(facts.alive, facts.exit_reason) for facts in heard.changes] == [(False, "its process ended")]
        async with node.service.ledger.lock("a" * 20):
            pass  # the clean-up has ended
        assert not faults.pending
        await node.service.sweep()
        record = node.service.ledger.find("a" * 20)
        assert (record.stage, record.ended) == (Stage.DEAD, True)
        await node.client.delete("a" * 20, generation=1)
        await assert_nothing_left(settings, node.parts)
