"""A disk that was changed while its sandbox was paused: nothing is begun with it unless that is asked for."""

from __future__ import annotations

import os
import shutil

import pytest

from cpuos.errors import Conflict, CpuosError
from cpuos.node.images import pause_name
from cpuos.node.receipts import CHANGED, NOTE, UNKNOWN
from cpuos.testing.faults import Faults
from cpuos.testing.node import fake_node
from cpuos.testing.waiting import until
from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy, PolicyLayer

A = "a" * 20
FREEZE = "f" * 32
OFF = EffectivePolicy(version=1, layers=[PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))])


def policy(version, **values):
    layers = [PolicyLayer(origin="sandbox", policy=NetworkPolicy.model_validate(values))]
    return EffectivePolicy(version=version, layers=layers)


async def resume(node, *, network=OFF, **values):
    return await node.client.resume(A, generation=1, network=network, **values)


def noted(node):
    return node.service._assembly.images.note(pause_name(A), NOTE)


async def paused(node, asking):
    """With a file, and its digest made."""
    await node.client.create(asking())
    file(node).write_text("before")
    await node.client.pause(A, generation=1, freeze=FREEZE)
    await until(lambda: noted(node) is not None)


def file(node):
    return node.parts.disks.path(A) / "workspace" / "file"


def change(node) -> None:
    """One byte, and the times are put back."""
    times = file(node).stat()
    with file(node).open("r+b") as opened:
        opened.write(b"B")
    os.utime(file(node), ns=(times.st_atime_ns, times.st_mtime_ns))


async def test_a_changed_disk_is_refused_and_nothing_is_lost(node, asking):
    await paused(node, asking)
    change(node)
    for _ in range(2):
        with pytest.raises(Conflict) as caught:
            await resume(node)
        assert (caught.value.code, caught.value.details) == ("restore_incomplete", {"missing": [CHANGED]})
        facts = await node.client.get(A)
        assert (facts.paused, facts.missing) == (True, [])
        assert await node.parts.runtimes["fake"].leftovers() == []
        assert await node.parts.slots.leftovers() == []
        assert node.service._assembly.images.has(pause_name(A))
    facts = await resume(node, incomplete=True)
    assert (facts.paused, facts.restored, facts.missing) == (False, "memory", [CHANGED])
    assert (await node.client.get(A)).missing == [CHANGED]
    await node.client.settle(A, generation=1)
    await node.client.pause(A, generation=1, freeze=FREEZE)
    assert (await resume(node)).missing == []


async def test_a_disk_that_was_moved_is_what_it_was(node, asking):
    await paused(node, asking)
    moved = file(node).with_name("moved")
    shutil.copy2(file(node), moved)
    moved.replace(file(node))
    assert (await resume(node)).missing == []


async def test_a_disk_that_was_moved_before_its_digest_was_made(node, asking, monkeypatch):
    """As by a move of all data right after a shutdown: it has its length and its times, and another place."""
    monkeypatch.setattr(node.parts.disks, "digest", lambda sandbox_id, go_on: None)
    await node.client.create(asking())
    file(node).write_text("before")
    await node.client.pause(A, generation=1, freeze=FREEZE)
    moved = file(node).with_name("moved")
    shutil.copy2(file(node), moved)
    moved.replace(file(node))
    assert (await resume(node)).missing == []


async def test_a_change_before_the_digest_is_made_is_told_as_not_known(node, asking, monkeypatch):
    monkeypatch.setattr(node.parts.disks, "digest", lambda sandbox_id, go_on: None)  # as when it is given up
    await node.client.create(asking())
    file(node).write_text("before")
    await node.client.pause(A, generation=1, freeze=FREEZE)
    change(node)
    with pytest.raises(Conflict) as caught:
        await resume(node)
    assert caught.value.details == {"missing": [UNKNOWN]}
    assert (await resume(node, incomplete=True)).missing == [UNKNOWN]


async def test_a_digest_is_only_of_what_was_parked(node, asking, monkeypatch):
    """One that is changed while its digest is made has none."""
    digest = node.parts.disks.digest
    made = []

    def late(sandbox_id, *, go_on):
        change(node)
        made.append(digest(sandbox_id, go_on=go_on))
        return made[-1]

    monkeypatch.setattr(node.parts.disks, "digest", late)
    await node.client.create(asking())
    file(node).write_text("before")
    await node.client.pause(A, generation=1, freeze=FREEZE)
    await until(lambda: made)
    await node.service.ledger.finish()
    assert noted(node) is None


async def test_a_forged_digest_counts_for_none(node, asking):
    await paused(node, asking)
    change(node)
    path = node.service._assembly.images.path(pause_name(A)) / f"{NOTE}.note"
    text = path.read_text()
    digest = noted(node)["digest"]
    path.write_text(text.replace(digest, "0" * len(digest)))
    with pytest.raises(Conflict) as caught:
        await resume(node)
    assert caught.value.details == {"missing": [UNKNOWN]}


@pytest.mark.parametrize("point", ["resume.start.before", "resume.running.after"])
async def test_a_resume_that_failed_makes_no_change_of_its_own(settings, asking, point):
    """What the host does to a disk in a try counts for none; what others do after it is seen."""
    faults = Faults()
    async with fake_node(settings, checkpoint=faults) as node:
        await paused(node, asking)
        unpark = node.parts.disks.unpark

        async def mounting(sandbox_id):
            os.utime(file(node))  # as a mount does
            return await unpark(sandbox_id)

        node.parts.disks.unpark = mounting
        faults.at(point)
        with pytest.raises(CpuosError):
            await resume(node)
        assert (await resume(node)).missing == []
        repaused = await node.client.repause(A, generation=1)
        assert repaused.paused
        await until(lambda: noted(node)["mark"] == node.service.ledger.find(A).disk_mark)
        change(node)
        with pytest.raises(Conflict) as caught:
            await resume(node)
        assert caught.value.details == {"missing": [CHANGED]}


async def test_one_that_refused_to_go_on_can_be_taken_up_again_with_its_processes(node, asking):
    await paused(node, asking)
    await resume(node)
    dialled = await node.dial.dial(A, 1)  # whoever has the statement could have let it go on
    dialled.socket.close()
    assert (await node.client.repause(A, generation=1, frozen=True)).paused
    assert (await resume(node)).restored == "memory"
    dialled = await node.dial.dial(A, 1)
    dialled.socket.close()
    await node.client.repause(A, generation=1)
    assert (await resume(node)).restored == "root"


async def test_a_daemon_makes_the_digests_that_the_last_one_did_not_come_to(settings, asking, monkeypatch):
    async with fake_node(settings) as node:
        monkeypatch.setattr(node.parts.disks, "digest", lambda sandbox_id, go_on: None)
        await node.client.create(asking())
        file(node).write_text("before")
        await node.client.pause(A, generation=1, freeze=FREEZE)
        assert noted(node) is None
    async with fake_node(settings) as node:
        await until(lambda: noted(node) is not None)
        change(node)
        with pytest.raises(Conflict) as caught:
            await resume(node)
        assert caught.value.details == {"missing": [CHANGED]}


def held(node):
    """The policies in force, each without its origin."""
    return [layer.policy for layer in node.parts.slots.policies[A].layers]


@pytest.mark.parametrize("version", [1, 2, 3], ids=["older", "the same", "newer"])
async def test_a_policy_of_another_history_holds_beside_the_one_of_the_pause(node, asking, version):
    """A database that was put back: what it says was not decided after the pause, unless its version says so."""
    await node.client.create(asking(network=policy(2, allow=["kept.example"])))
    await node.client.pause(A, generation=1, freeze=FREEZE)
    other = policy(version, mode="internet")
    if version == 3:
        assert (await resume(node, network=other)).missing == []
        assert held(node) == [other.layers[0].policy]
        return
    for _ in range(2):
        with pytest.raises(Conflict) as caught:
            await resume(node, network=other)
        assert caught.value.code == "restore_incomplete"
        assert await node.parts.slots.leftovers() == []
    (told,) = caught.value.details["missing"]
    assert told.startswith("the network policy as it was: version ")
    facts = await resume(node, network=other, incomplete=True)
    assert facts.missing == [told]
    assert held(node) == [policy(2, allow=["kept.example"]).layers[0].policy, other.layers[0].policy]
    await node.client.settle(A, generation=1)
    decided = policy(3, mode="internet")
    await node.client.update_network(A, generation=1, policy=decided)
    assert held(node) == [decided.layers[0].policy]


async def test_an_older_version_that_says_the_same_is_the_same(node, asking):
    await node.client.create(asking(network=policy(2, mode="off")))
    await node.client.pause(A, generation=1, freeze=FREEZE)
    assert (await resume(node, network=policy(1, mode="off"))).missing == []


def test_of_too_many_policies_nothing_is_allowed():
    held = policy(1, allow=["0.example"])
    for number in range(1, 4):
        held = held.and_also(policy(1, allow=[f"{number}.example"]))
        assert len(held.layers) == number + 1
        assert held == held.and_also(policy(9, allow=[f"{number}.example"]))
    held = held.and_also(policy(1, allow=["4.example"]))
    assert [layer.policy.mode for layer in held.layers] == [NetworkMode.OFF]


@pytest.mark.parametrize("other", [{"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "b": "1", "c": "1"}])
async def test_labels_that_are_not_those_of_the_pause(node, asking, other):
    kept = {"a": "1", "b": "1"}
    await node.client.create(asking())
    await node.client.pause(A, generation=1, freeze=FREEZE, labels=kept)
    with pytest.raises(Conflict) as caught:
        await resume(node, labels=other)
    (name,) = {key for key, _ in kept.items() ^ other.items()}
    told = f"the labels as they were: the record has others for {name}"
    assert (caught.value.code, caught.value.details) == ("restore_incomplete", {"missing": [told]})
    facts = await resume(node, labels=other, incomplete=True)
    assert facts.missing == [told]


@pytest.mark.parametrize(("kept", "asked"), [(None, {"a": "1"}), ({"a": "1"}, None), ({"a": "1"}, {"a": "1"})])
async def test_labels_that_nobody_has_told_are_not_compared(node, asking, kept, asked):
    await node.client.create(asking())
    await node.client.pause(A, generation=1, freeze=FREEZE, labels=kept)
    assert (await resume(node, labels=asked)).missing == []
    await node.client.settle(A, generation=1)
    await node.client.pause(A, generation=1, freeze=FREEZE)  # those of before count no more
    assert (await resume(node, labels={"b": "1"})).missing == []
