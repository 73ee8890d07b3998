"""Ready sandboxes on a node with the fake runtime: filled, taken, given up; with a fault at every step."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from cpuos.errors import Conflict, CpuosError, NotFound, PlatformError
from cpuos.node.journal import Stage
from cpuos.node.pool.shape import shape_of
from cpuos.node.recovery import Recovery, decide
from cpuos.testing.faults import Faults, assert_nothing_left
from cpuos.testing.node import fake_node, fake_settings, write_fake_template
from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy, PolicyLayer
from cpuos.types.sandbox import StartedFrom

FILL_STEPS = ["record", "workdir", "disk", "slot", "start", "agent", "ready"]
TAKE_STEPS = ["record", "network"]
GIVE_UP_STEPS = ["image", "destroy", "slot", "disk", "workdir", "forget"]


def points(verb: str, steps: list[str]) -> list[str]:
    return [f"{verb}.{step}.{side}" for step in steps for side in ("before", "after")]


def policy(version: int = 3) -> EffectivePolicy:
    layer = PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))
    return EffectivePolicy(version=version, layers=[layer])


async def fill(node, asking, **changes):
    """Its id."""
    before = {ready.id for ready in (await node.client.pool(0)).ready}
    await node.service.pool.fill(shape_of(asking(**changes), digest="sha256:fake"))
    (new,) = {ready.id for ready in (await node.client.pool(0)).ready} - before
    return new


def naming(asking, sandbox_id, **changes):
    return asking(**{"id": sandbox_id, "hostname": sandbox_id, "network": policy(), **changes})


async def test_a_ready_one_is_taken_as_it_is(node, asking):
    ready = await fill(node, asking)
    process = node.service.ledger.find(ready).process
    key = node.service.ledger.find(ready).session_key
    facts = await node.client.create(naming(asking, ready))
    record = node.service.ledger.find(ready)
    assert (facts.id, facts.started_from, facts.alive) == (ready, StartedFrom.POOL, True)
    assert (record.stage, record.process, record.session_key) == (Stage.RUNNING, process, key)
    assert node.parts.slots.policies[ready] == policy()
    assert (await node.client.pool(0)).ready == []
    assert await node.client.create(naming(asking, ready)) == facts
    assert [one.id for one in await node.client.list()] == [ready]
    await node.client.delete(ready, generation=1)
    with pytest.raises(Conflict, match="was deleted"):
        await node.client.create(naming(asking, ready))


async def test_others_begin_cold(node, asking):
    assert (await node.client.create(asking())).started_from is StartedFrom.COLD


async def test_who_wants_a_ready_one_gets_no_other(settings, node, asking):
    with pytest.raises(Conflict) as caught:
        await node.client.create(asking(ready=True))
    assert caught.value.code == "sandbox_not_ready"
    await assert_nothing_left(settings, node.parts)
    assert (await node.client.create(asking())).started_from is StartedFrom.COLD


@pytest.mark.parametrize("end", ["given up", "deleted", "unfit", "being given up"])
async def test_one_that_is_ready_no_more_is_refused_and_can_be_made_anew(settings, node, asking, end):
    ready = await fill(node, asking)
    record = node.service.ledger.find(ready)
    wanted = naming(asking, ready, ready=True, **({"cpu": 2} if end == "unfit" else {}))
    going = None
    if end == "given up":
        await node.service.pool.discard(record)
    elif end == "deleted":
        await node.client.delete(ready, generation=1)
    elif end == "being given up":
        going = asyncio.ensure_future(node.service.pool.discard(record))
    with pytest.raises(Conflict) as caught:
        await node.client.create(wanted)
    assert caught.value.code == "sandbox_not_ready"
    if going is not None:
        await going
    await assert_nothing_left(settings, node.parts)
    anew = await node.client.create(wanted.model_copy(update={"ready": False, "generation": 2}))
    assert (anew.generation, anew.started_from) == (2, StartedFrom.COLD)
    with pytest.raises(Conflict, match="generation 1"):
        await node.client.delete(ready, generation=1)
    assert (await node.client.get(ready)).alive


async def test_the_answer_to_who_took_it_is_the_same_again(node, asking):
    wanted = naming(asking, await fill(node, asking), ready=True)
    facts = await node.client.create(wanted)
    assert await node.client.create(wanted) == facts


async def test_nobody_hears_of_a_ready_one_and_it_reaches_nothing(node, asking):
    after = (await node.client.changes(0)).seq
    ready = await fill(node, asking)
    assert await node.client.list() == []
    assert (await node.client.changes(after, wait_s=0)).changes == []
    calls = [
        node.client.get(ready),
        node.client.stats(ready),
        node.client.pause(ready, generation=1, freeze="0" * 32),
        node.client.update_network(ready, generation=1, policy=policy()),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            await call
    assert [layer.policy.mode for layer in node.parts.slots.policies[ready].layers] == [NetworkMode.OFF]


async def test_its_agent_is_reached_before_the_create_that_takes_it(node, asking):
    ready = await fill(node, asking)
    key = node.service.ledger.find(ready).session_key
    before = await node.dial.dial(ready, 1)
    await node.client.create(naming(asking, ready))
    after = await node.dial.dial(ready, 1)
    for dialled in (before, after):
        with dialled.socket as guest:
            guest.connect(dialled.address)
    assert {before.session_key.hex(), after.session_key.hex()} == {key}  # the agent takes a repeat
    with pytest.raises(NotFound):
        await node.dial.dial("z" * 20, 1)
    with pytest.raises(CpuosError):
        await node.dial.dial(await fill(node, asking), 2)


@pytest.mark.parametrize(
    "other",
    [{"cpu": 2}, {"memory_mib": 512}, {"disk_mib": 128}, {"max_processes": 128}, {"hostname": "named"}],
    ids=lambda other: next(iter(other)),
)
async def test_one_that_does_not_fit_is_not_taken(settings, node, asking, other):
    ready = await fill(node, asking)
    process = node.service.ledger.find(ready).process
    facts = await node.client.create(naming(asking, ready, **other))
    assert (facts.id, facts.started_from) == (ready, StartedFrom.COLD)
    assert node.service.ledger.find(ready).process != process
    await node.client.delete(ready, generation=1)
    await assert_nothing_left(settings, node.parts)


async def test_one_of_another_template_is_not_taken(settings, node, asking):
    write_fake_template(settings, "base")  # its image is equal, as that of another workspace's build may be
    ready = await fill(node, asking)
    facts = await node.client.create(naming(asking, ready, template="base"))
    assert (facts.template, facts.started_from) == ("base", StartedFrom.COLD)


async def test_two_creates_never_get_the_same_one(node, asking):
    ready = await fill(node, asking)
    one, other = naming(asking, ready), naming(asking, ready, network=policy(version=4))
    answers = await asyncio.gather(node.client.create(one), node.client.create(other))
    assert answers[0] == answers[1]  # the same sandbox twice, as any repeat
    with pytest.raises(Conflict):
        await node.client.create(naming(asking, ready, cpu=2))


async def test_what_is_ready_differs_in_all_that_is_its_own(node, asking):
    records = [node.service.ledger.find(await fill(node, asking)) for _ in range(3)]
    for name in ("id", "session_key", "process"):
        assert len({getattr(record, name) for record in records}) == 3
    assert len({record.request.hostname for record in records}) == 3


async def test_a_ready_one_that_dies_is_not_offered(settings, node, asking):
    ready = await fill(node, asking)
    seq = (await node.client.pool(0)).seq
    os.kill(node.service.ledger.find(ready).process.pid, signal.SIGKILL)
    told = await node.client.pool(seq, wait_s=30)
    assert told.ready == []
    assert (await node.client.changes(0, wait_s=0)).changes == []
    await assert_nothing_left(settings, node.parts)
    assert (await node.client.create(naming(asking, ready))).started_from is StartedFrom.COLD


async def test_creates_come_before_what_is_ready(asking):
    async with fake_settings(max_sandboxes=2) as settings, fake_node(settings) as node:
        ready = [await fill(node, asking) for _ in range(2)]
        assert (await node.client.create(asking("a"))).alive
        assert [one.id for one in (await node.client.pool(0)).ready] == ready[1:]
        assert (await node.client.create(asking("b"))).alive
        assert (await node.client.pool(0)).ready == []
        with pytest.raises(CpuosError, match="max_sandboxes"):
            await node.client.create(asking("c"))


async def test_a_node_that_stops_gives_them_up(settings, asking):
    async with fake_node(settings) as node:
        await fill(node, asking)
    await assert_nothing_left(settings, node.parts)


async def test_the_lists_above_name_every_step(settings, asking):
    faults = Faults()
    async with fake_node(settings, checkpoint=faults) as node:
        ready = await fill(node, asking)
        await node.client.create(naming(asking, ready))
        await fill(node, asking)
        assert await node.service.pool.shrink() == 1
    seen = sorted({point for point in faults.seen if point.startswith(("fill.", "take.", "give-up."))})
    assert seen == sorted(points("fill", FILL_STEPS) + points("take", TAKE_STEPS) + points("give-up", GIVE_UP_STEPS))


@pytest.mark.parametrize("point", points("fill", FILL_STEPS))
async def test_failed_fill_leaves_nothing(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        with pytest.raises(Exception, match=point):
            await fill(node, asking)
        assert (await node.client.pool(0)).ready == []
        await assert_nothing_left(settings, node.parts)
        await fill(node, asking)


@pytest.mark.parametrize("step", FILL_STEPS)
async def test_failed_undo_of_a_fill_is_tried_again(settings, asking, step):
    faults = Faults("fill.ready.before", f"fill.{step}.undo")
    async with fake_node(settings, checkpoint=faults) as node:
        with pytest.raises(Exception, match="undo"):
            await fill(node, asking)
        assert not faults.pending
        await node.service.sweep()
        await assert_nothing_left(settings, node.parts)


@pytest.mark.parametrize("point", points("take", TAKE_STEPS))
async def test_failed_take_leaves_nothing_and_its_repeat_begins_cold(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        ready = await fill(node, asking)
        with pytest.raises(PlatformError, match="cannot create sandbox"):
            await node.client.create(naming(asking, ready))
        await assert_nothing_left(settings, node.parts)
        assert (await node.client.pool(0)).ready == []
        assert (await node.client.create(naming(asking, ready))).started_from is StartedFrom.COLD


@pytest.mark.parametrize("point", points("give-up", GIVE_UP_STEPS))
async def test_failed_end_of_a_ready_one_is_tried_again(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        await fill(node, asking)
        await node.service.pool.shrink()
        assert (await node.client.pool(0)).ready == []
        await node.service.sweep()
        await assert_nothing_left(settings, node.parts)


async def test_one_of_a_snapshot_is_for_those_who_ask_for_it(settings, node, asking):
    snapshot, freeze = "s" * 20, "0" * 32
    await node.client.create(asking("a"))
    await node.client.snapshot("a" * 20, generation=1, snapshot=snapshot, freeze=freeze)
    ready = await fill(node, asking, snapshot=snapshot)
    (told,) = (await node.client.pool(0, wait_s=0)).ready
    assert told.snapshot == snapshot
    record = node.service.ledger.find(ready)
    assert (record.thaw, record.thaw_from, record.incarnation) == (freeze, "a" * 20, 1)  # nothing of it runs yet
    facts = await node.client.create(naming(asking, ready, snapshot=snapshot))
    assert (facts.started_from, facts.restored, facts.incarnation) == (StartedFrom.POOL, "memory", 1)
    other = await fill(node, asking, snapshot=snapshot)
    assert (await node.client.create(naming(asking, other))).started_from is StartedFrom.COLD
    await node.client.delete_snapshot(snapshot)
    with pytest.raises(NotFound):
        await fill(node, asking, snapshot=snapshot)


async def test_after_a_reboot_none_is_ready(node, asking):
    record = node.service.ledger.find(await fill(node, asking))
    assert decide(record, boot_id=record.boot_id) is Recovery.ADOPT
    assert decide(record, boot_id="another") is Recovery.UNDO


async def test_one_that_was_deleted_is_not_offered(settings, node, asking):
    ready = await fill(node, asking)
    seq = (await node.client.pool(0, wait_s=0)).seq
    await node.client.delete(ready, generation=1)  # as the undo of a create that did not come to the node
    told = await node.client.pool(seq, wait_s=0)
    assert (told.ready, told.seq > seq) == ([], True)
    await assert_nothing_left(settings, node.parts)
