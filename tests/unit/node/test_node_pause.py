"""Pause, resume and snapshots: idempotent, fenced, and whole or not at all whatever step fails."""

from __future__ import annotations

import asyncio
import json
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from cpuos.errors import Conflict, CpuosError, InvalidRequest, NotFound, PlatformError, Unavailable
from cpuos.node.journal import Stage
from cpuos.testing.faults import Faults, assert_nothing_left
from cpuos.testing.node import fake_node
from cpuos.testing.waiting import until
from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy, PolicyLayer

A, B, S = "a" * 20, "b" * 20, "s" * 20
FREEZE = "f" * 32
SAVE = ["record", "begin", "memory", "root"]
PAUSE_STEPS = [*SAVE, "sync", "commit", "paused"]
PARK_STEPS = ["destroy", "slot", "disk"]
RESUME_STEPS = ["record", "disk", "slot", "start", "check", "running"]
SNAPSHOT_STEPS = [*SAVE, "disk", "commit", "running"]


def points(verb: str, steps: list[str]) -> list[str]:
    return [f"{verb}.{step}.{side}" for step in steps for side in ("before", "after")]


def policy(version: int) -> EffectivePolicy:
    layer = PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))
    return EffectivePolicy(version=version, layers=[layer])


async def pause(node):
    return await node.client.pause(A, generation=1, freeze=FREEZE)


async def resume(node, version: int = 1):
    return await node.client.resume(A, generation=1, network=policy(version))


async def snapshot(node, snapshot: str = S, **values):
    return await node.client.snapshot(A, generation=1, snapshot=snapshot, **({"freeze": FREEZE} | values))


async def said(node, sandbox_id: str = A) -> dict:
    """The statement that the next dial gets."""
    dialled = await node.dial.dial(sandbox_id, 1)
    dialled.socket.close()
    return json.loads(dialled.statement)


async def test_paused_is_alive_and_only_files(node, asking):
    await node.client.create(asking())
    first = await said(node)
    facts = await pause(node)
    assert (facts.alive, facts.paused, facts.settled) == (True, True, True)
    assert await node.parts.runtimes["fake"].leftovers() == []
    assert await node.parts.slots.leftovers() == []
    assert await node.parts.disks.leftovers() == [A]
    assert node.service.ledger.find(A).parked
    for call in (node.dial.dial(A, 1), node.client.stats(A)):
        with pytest.raises(Unavailable) as caught:
            await call
        assert caught.value.code == "sandbox_paused"
    assert await pause(node) == facts
    resumed = await resume(node)
    assert (resumed.alive, resumed.paused, resumed.settled, resumed.restored) == (True, False, False, "memory")
    assert resumed.incarnation > facts.incarnation
    assert (await resume(node)).started_at == resumed.started_at
    statement = await said(node)
    assert (statement["thaw"], statement["from"], statement["sandbox"]) == (FREEZE, A, A)
    assert statement["incarnation"] == resumed.incarnation
    assert statement["session_key"] != first["session_key"]
    await node.client.settle(A, generation=1)
    await node.client.settle(A, generation=1)
    assert (await node.client.get(A)).settled
    assert not node.service._assembly.images.has(f"pause-{A}")
    await node.client.delete(A, generation=1)


async def test_pause_and_its_like_are_fenced(node, asking):
    await node.client.create(asking(generation=2))
    for call in (
        pause(node),
        resume(node),
        node.client.settle(A, generation=1),
        node.client.repause(A, generation=1),
        snapshot(node),
    ):
        with pytest.raises(Conflict) as caught:
            await call
        assert caught.value.code == "stale_generation"
    with pytest.raises(NotFound):
        await node.client.pause(B, generation=1, freeze=FREEZE)


async def test_repause_undoes_a_resume_until_it_is_settled(node, asking):
    await node.client.create(asking())
    await pause(node)
    first = await resume(node)
    facts = await node.client.repause(A, generation=1)
    assert facts.paused
    assert facts.pause_reason
    assert (await node.client.repause(A, generation=1)).paused
    again = await resume(node)
    assert again.incarnation > first.incarnation
    assert again.pause_reason == ""
    await node.client.settle(A, generation=1)
    with pytest.raises(Conflict, match="cannot pause sandbox again"):
        await node.client.repause(A, generation=1)
    await pause(node)  # frozen anew
    assert (await resume(node)).incarnation > again.incarnation


async def test_newest_policy_holds_after_a_resume(node, asking):
    await node.client.create(asking())
    await pause(node)
    await node.client.update_network(A, generation=1, policy=policy(5))
    assert A not in node.parts.slots.policies
    await resume(node, version=3)
    assert node.parts.slots.policies[A].version == 5
    await node.client.repause(A, generation=1)
    await resume(node, version=9)
    assert node.parts.slots.policies[A].version == 9


async def test_paused_takes_no_room(settings, asking):
    small = settings.model_copy(update={"max_sandboxes": 1})
    async with fake_node(small) as node:
        await node.client.create(asking())
        await pause(node)
        await node.client.create(asking("b"))
        with pytest.raises(CpuosError) as caught:
            await resume(node)
        assert caught.value.code == "capacity_exceeded"
        assert (await node.client.get(A)).paused
        await node.client.delete(B, generation=1)
        assert not (await resume(node)).paused


@pytest.mark.parametrize("told", [False, True])
async def test_death_before_it_is_settled_is_a_pause_again(node, asking, told):
    """With its processes only if they cannot have gone on: they would find files that are newer than they know."""
    await node.client.create(asking())
    await pause(node)
    await resume(node)
    if told:
        await said(node)
    after = (await node.client.changes(0)).seq
    (node.settings.run_dir / "fake" / "runtime" / A / "image").unlink()  # the fake then ends it for good
    await node.parts.runtimes["fake"].destroy(A)
    heard = await node.client.changes(after, wait_s=60)
    assert [(facts.alive, facts.paused) for facts in heard.changes] == [(True, True)]
    assert "its process ended" in heard.changes[0].pause_reason
    async with node.service.ledger.lock(A):
        pass  # what is left of it has gone
    again = await resume(node)
    assert (again.paused, again.restored) == (False, "root" if told else "memory")
    await said(node)
    await node.client.settle(A, generation=1)
    await pause(node)
    assert (await resume(node)).restored == "memory"


async def test_a_host_that_failed_before_it_was_settled(settings, asking):
    async with fake_node(settings) as node:
        await node.client.create(asking())
        await pause(node)
        await resume(node)
        await said(node)
        (settings.run_dir / "fake" / "runtime" / A / "image").unlink()
        node.service._kit.__dict__["boot_id"] = "another"
        await node.service.ledger.keep(node.service.ledger.find(A).becomes(Stage.RUNNING, boot_id="before"))
    async with fake_node(settings) as node:
        assert (await node.client.get(A)).paused
        assert (await resume(node)).restored == "root"
        await node.client.delete(A, generation=1)


async def test_pause_survives_the_daemon_and_the_host(settings, asking):
    async with fake_node(settings) as node:
        await node.client.create(asking())
        await pause(node)
    async with fake_node(settings) as node:
        assert (await node.client.get(A)).paused
        node.service._kit.__dict__["boot_id"] = "another"
        assert not (await resume(node)).paused
        await node.client.delete(A, generation=1)
        await assert_nothing_left(settings, node.parts)


@pytest.mark.parametrize("point", points("pause", PAUSE_STEPS))
async def test_failed_pause_lets_it_run_on(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking())
        pid = node.service.ledger.find(A).process.pid
        before = await said(node)
        with pytest.raises(PlatformError, match="cannot pause sandbox"):
            await pause(node)
        assert not faults.pending
        facts = await node.client.get(A)
        assert (facts.alive, facts.paused) == (True, False)
        assert node.service.ledger.find(A).process.pid == pid
        assert not node.service._assembly.images.owners()
        statement = await said(node)
        assert statement["thaw"] == FREEZE
        assert statement["incarnation"] > before["incarnation"]
        assert (await pause(node)).paused
        await resume(node)
        await node.client.delete(A, generation=1)
        await assert_nothing_left(settings, node.parts)


@pytest.mark.parametrize("point", points("park", PARK_STEPS))
async def test_what_a_pause_did_not_take_away_goes_later(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking())
        assert (await pause(node)).paused
        assert not faults.pending
        assert not node.service.ledger.find(A).parked
        await node.service.sweep()
        assert node.service.ledger.find(A).parked
        assert await node.parts.slots.leftovers() == []
        await resume(node)
        await node.client.delete(A, generation=1)
        await assert_nothing_left(settings, node.parts)


@pytest.mark.parametrize("point", points("resume", RESUME_STEPS))
async def test_failed_resume_leaves_it_paused(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking())
        await pause(node)
        with pytest.raises(PlatformError, match="cannot resume sandbox"):
            await resume(node)
        assert not faults.pending
        facts = await node.client.get(A)
        assert (facts.alive, facts.paused) == (True, True)
        assert await node.parts.runtimes["fake"].leftovers() == []
        assert await node.parts.slots.leftovers() == []
        tried = node.service.ledger.find(A).incarnation
        resumed = await resume(node)
        assert not resumed.paused
        assert point == "resume.record.before" or resumed.incarnation > tried
        await node.client.delete(A, generation=1)
        await assert_nothing_left(settings, node.parts)


@pytest.mark.parametrize("step", ["disk", "slot", "start"])
async def test_failed_undo_of_a_resume_is_tried_again(settings, asking, step):
    faults = Faults("resume.running.before", f"resume.{step}.undo")
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking())
        await pause(node)
        with pytest.raises(CpuosError):
            await resume(node)
        assert not faults.pending
        await node.service.sweep()
        assert node.service.ledger.find(A).parked
        assert await node.parts.slots.leftovers() == []
        assert not (await resume(node)).paused


@pytest.mark.parametrize("point", points("snapshot", SNAPSHOT_STEPS))
async def test_failed_snapshot_leaves_none_and_lets_it_run_on(settings, asking, point):
    faults = Faults(point)
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking())
        before = await said(node)
        with pytest.raises(PlatformError, match="cannot save sandbox"):
            await snapshot(node)
        assert not faults.pending
        assert await node.client.snapshots() == []
        if point != "snapshot.record.before":
            assert (await said(node))["incarnation"] > before["incarnation"]
            assert (await said(node))["thaw"] == FREEZE
        assert (await snapshot(node)).id == S
        await node.client.delete_snapshot(S)
        await node.client.delete(A, generation=1)
        await assert_nothing_left(settings, node.parts)
        assert list((settings.node_state_dir / "snapshots").iterdir()) == []


async def test_snapshot_of_one_that_runs_and_creates_from_it(node, asking):
    await node.client.create(asking())
    (node.parts.disks.path(A) / "workspace" / "kept").write_text("here")
    made = await snapshot(node)
    assert (made.memory, made.sandbox, made.template_digest, made.runtime_version) == (True, A, "sha256:fake", "1")
    assert await snapshot(node) == made
    assert await node.client.snapshots() == [made]
    (node.parts.disks.path(A) / "workspace" / "kept").write_text("later")
    await node.client.delete(A, generation=1)
    for letter in "bcd":
        facts = await node.client.create(asking(letter, snapshot=S))
        assert (facts.restored, facts.incarnation, facts.restored_at) == ("memory", 1, made.created_at)
        statement = await said(node, letter * 20)
        assert (statement["thaw"], statement["from"]) == (FREEZE, A)
        assert (node.parts.disks.path(letter * 20) / "workspace" / "kept").read_text() == "here"
    cold = await node.client.create(asking("e", snapshot=S, warm=False))
    assert (cold.restored, cold.incarnation) == ("root", 0)
    assert "thaw" not in await said(node, "e" * 20)
    await node.client.delete_snapshot(S)
    await node.client.delete_snapshot(S)
    with pytest.raises(NotFound) as caught:
        await node.client.create(asking("f", snapshot=S))
    assert caught.value.code == "snapshot_not_found"


async def test_snapshot_of_a_paused_one(node, asking):
    await node.client.create(asking())
    (node.parts.disks.path(A) / "workspace" / "kept").write_text("here")
    await pause(node)
    assert (await snapshot(node, freeze=None)).memory
    assert (await node.client.get(A)).paused
    await resume(node)
    await node.client.settle(A, generation=1)
    await node.client.delete(A, generation=1)
    await node.client.create(asking("b", snapshot=S))
    assert (await said(node, B))["thaw"] == FREEZE
    assert (node.parts.disks.path(B) / "workspace" / "kept").read_text() == "here"


async def test_snapshot_of_files_alone_needs_no_freeze(node, asking):
    await node.client.create(asking())
    with pytest.raises(InvalidRequest):
        await snapshot(node, freeze=None)
    made = await snapshot(node, freeze=None, memory=False)
    assert not made.memory
    assert (await node.client.get(A)).incarnation == 0
    assert (await node.client.create(asking("b", snapshot=S))).restored == "root"


async def test_snapshot_fits_what_it_was_made_of(node, asking):
    await node.client.create(asking())
    await snapshot(node)
    for changes in ({"memory_mib": 512}, {"cpu": 2}, {"disk_mib": 128}, {"max_processes": 65}):
        with pytest.raises(InvalidRequest) as caught:
            await node.client.create(asking("b", snapshot=S, **changes))
        assert caught.value.details["field"] == next(iter(changes))
    with pytest.raises(InvalidRequest):
        await node.client.create(asking("b", snapshot=S, disk_mib=128, warm=False))
    await node.client.create(asking("b", snapshot=S, memory_mib=512, warm=False))


async def test_snapshot_of_an_older_version_is_refused_and_its_files_taken(node, asking):
    await node.client.create(asking())
    await snapshot(node)
    await pause(node)
    type(node.parts.runtimes["fake"]).image_version = "2"
    try:
        with pytest.raises(Conflict) as caught:
            await node.client.create(asking("b", snapshot=S))
        assert caught.value.code == "snapshot_incompatible"
        assert "made by fake 1" in caught.value.why
        assert (await node.client.create(asking("b", snapshot=S, warm=False))).restored == "root"
        resumed = await resume(node)
        assert (resumed.paused, resumed.restored) == (False, "root")
        assert "made by fake 1" in resumed.pause_reason
        assert "thaw" not in await said(node)
    finally:
        type(node.parts.runtimes["fake"]).image_version = "1"


async def test_template_that_is_built_anew_changes_nothing_for_what_was_saved(settings, asking):
    manifest = settings.template_dir / "python" / "manifest.json"
    async with fake_node(settings) as node:
        await node.client.create(asking())
        await snapshot(node)
        await pause(node)
        manifest.write_text(manifest.read_text().replace("sha256:fake", "sha256:other"))
        (settings.template_dir / "python" / "root.erofs").unlink()
        (settings.template_dir / "python" / "root.erofs").write_bytes(b"")
    async with fake_node(settings) as node:
        assert (await node.client.create(asking("b", snapshot=S))).template_digest == "sha256:fake"
        assert (await node.client.create(asking("c"))).template_digest == "sha256:other"
        assert (await resume(node)).template_digest == "sha256:fake"
        kept = node.settings.node_state_dir / "template-images"
        assert len(list(kept.iterdir())) == 2
        for letter in "abc":
            await node.client.delete(letter * 20, generation=1)
        await node.client.delete_snapshot(S)
    clock = lambda: datetime.now(UTC) + timedelta(hours=2)  # noqa: E731
    async with fake_node(settings) as node:
        assert len(list(kept.iterdir())) == 2  # marked, no more
        node.service.ledger.clock = node.service._upkeep._garbage._clock = clock
        await node.service._upkeep.collect()
        assert list(kept.iterdir()) == []


async def test_snapshot_of_a_build_that_is_gone_is_refused(node, asking):
    await node.client.create(asking())
    await snapshot(node)
    manifest = node.settings.template_dir / "python" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sha256:fake", "sha256:other"))
    for path in node.service._kit.templates.unneeded([]):
        path.unlink()
    with pytest.raises(Conflict) as caught:
        await node.client.create(asking("b", snapshot=S))
    assert caught.value.code == "snapshot_incompatible"
    cold = await node.client.create(asking("b", snapshot=S, warm=False))
    assert (cold.restored, cold.template_digest) == ("workspace", "sha256:other")


async def test_damaged_snapshot_is_refused(node, asking):
    await node.client.create(asking())
    await snapshot(node)
    images = node.service._assembly.images
    await until((images.path(S) / "digests.json").exists)
    memory = images.path(S) / "memory" / "process"
    text = memory.read_text()
    memory.write_text(text.replace("pid", "qid"))
    with pytest.raises(PlatformError) as caught:
        await node.client.create(asking("b", snapshot=S))
    assert caught.value.code == "snapshot_damaged"
    assert await node.client.list() == [await node.client.get(A)]
    memory.write_text(text)
    shutil.copytree(images.path(S), images.path("t" * 20))
    with pytest.raises(PlatformError) as caught:
        await node.client.create(asking("b", snapshot="t" * 20))
    assert "manifest is that of" in caught.value.why
    assert [facts.id for facts in await node.client.snapshots()] == [S]


async def test_snapshot_is_kept_while_a_create_reads_it(node, asking):
    await node.client.create(asking())
    await snapshot(node)
    with node.service._assembly.images.reading(S):
        with pytest.raises(Conflict) as caught:
            await node.client.delete_snapshot(S)
        assert caught.value.code == "snapshot_in_use"
    await node.client.delete_snapshot(S)


async def test_id_of_a_snapshot_is_taken_once(node, asking):
    await node.client.create(asking())
    await node.client.create(asking("b"))
    await snapshot(node)
    with pytest.raises(Conflict, match="cannot make snapshot"):
        await node.client.snapshot(B, generation=1, snapshot=S, freeze=FREEZE)
    with pytest.raises(NotFound):
        await node.client.delete_snapshot("..%2fx")


async def test_snapshot_of_what_is_left_of_one_that_died(node, asking):
    await node.client.create(asking())
    (node.parts.disks.path(A) / "workspace" / "kept").write_text("here")
    root = node.settings.run_dir / "fake" / "runtime" / A / "root" / "etc" / "kept"
    root.parent.mkdir(exist_ok=True)
    root.write_text("root")
    await pause(node)
    paused_at = node.service.ledger.find(A).changed_at
    await resume(node)
    await node.client.settle(A, generation=1)
    after = (await node.client.changes(0)).seq
    await node.parts.runtimes["fake"].destroy(A)
    heard = await node.client.changes(after, wait_s=60)
    assert [facts.alive for facts in heard.changes] == [False]
    async with node.service.ledger.lock(A):
        pass  # what goes has gone
    await node.service.sweep()
    assert await node.parts.disks.leftovers() == [A]
    with pytest.raises(InvalidRequest):
        await snapshot(node)
    made = await snapshot(node, freeze=None, memory=False)
    assert (made.memory, made.root) == (False, True)
    assert made.root_at <= paused_at < made.created_at
    await node.client.delete(A, generation=1)
    again = await node.client.create(asking(generation=2, snapshot=S))
    assert (again.restored, again.restored_at) == ("root", made.root_at)
    assert (node.parts.disks.path(A) / "workspace" / "kept").read_text() == "here"
    assert root.read_text() == "root"
    await node.client.delete(A, generation=2)
    await node.client.delete_snapshot(S)
    await assert_nothing_left(node.settings, node.parts)
    assert list((node.settings.node_state_dir / "snapshots").iterdir()) == []


async def test_root_is_kept_on_demand(node, asking):
    await node.client.create(asking())
    root = node.settings.run_dir / "fake" / "runtime" / A / "root" / "etc" / "kept"
    root.parent.mkdir(exist_ok=True)
    for text in ("first", "second"):
        root.write_text(text)
        await node.client.keep_root(A, generation=1)
    assert (await node.client.get(A)).incarnation == 0
    root.write_text("never kept")
    await node.parts.runtimes["fake"].destroy(A)
    while not node.service.ledger.find(A).ended:  # noqa: ASYNC110 (its watch)
        await asyncio.sleep(0.01)
    made = await snapshot(node, freeze=None, memory=False)
    assert made.root
    await node.client.create(asking("b", snapshot=S))
    assert (node.settings.run_dir / "fake" / "runtime" / B / "root" / "etc" / "kept").read_text() == "second"
    with pytest.raises(CpuosError):
        await node.client.keep_root(A, generation=1)
