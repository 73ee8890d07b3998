"""Verbs of the node over its sockets: generations, repeats, concurrency, changes."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime

import httpx2
import pytest

from cpuos.errors import (
    CapacityExceeded,
    Conflict,
    CpuosError,
    NotFound,
    PlatformError,
    SandboxGone,
    SetupRequired,
)
from cpuos.node.upkeep import GONE_KEPT
from cpuos.testing.fake_runtime import FakeRuntime
from cpuos.testing.faults import Faults, assert_nothing_left
from cpuos.testing.node import fake_node
from cpuos.testing.waiting import until

A = "a" * 20


async def test_create_list_delete(node, asking):
    facts = await node.client.create(asking())
    assert (facts.id, facts.alive, facts.isolation, facts.template_digest) == (A, True, "none", "sha256:fake")
    assert facts.started_at is not None
    assert await node.client.list() == [facts]
    assert await node.client.get(A) == facts
    stats = await node.client.stats(A)
    assert stats.memory_bytes > 0
    await node.client.delete(A, generation=1)
    await node.client.delete(A, generation=1)
    assert await node.client.list() == []
    with pytest.raises(NotFound):
        await node.client.get(A)
    await assert_nothing_left(node.settings, node.parts)


async def test_node_facts(node):
    facts = await node.client.facts()
    assert [(template.name, template.digest) for template in facts.templates] == [("python", "sha256:fake")]
    assert [(runtime.name, runtime.available) for runtime in facts.runtimes] == [("fake", True)]
    assert facts.cpu >= 1
    assert facts.memory_mib > 100
    assert facts.disk_mib > 0
    assert facts.max_sandboxes == 64
    assert len(facts.boot_id) == 36


async def test_a_repeat_answers_the_same_facts(node, asking):
    first = await node.client.create(asking())
    assert await node.client.create(asking()) == first


async def test_parallel_repeats_make_one_sandbox(node, asking):
    answers = await asyncio.gather(*(node.client.create(asking()) for _ in range(5)))
    assert all(answer == answers[0] for answer in answers)
    assert len(await node.parts.runtimes["fake"].leftovers()) == 1


async def test_a_repeat_with_other_values_is_refused(node, asking):
    await node.client.create(asking())
    with pytest.raises(Conflict, match="cannot create") as caught:
        await node.client.create(asking(memory_mib=512))
    assert caught.value.code == "wrong_state"


async def test_generations(node, asking):
    await node.client.create(asking(generation=3))
    for call in (
        node.client.create(asking(generation=2)),
        node.client.delete(A, generation=2),
        node.dial.dial(A, 2),
        node.dial.dial(A, 4),
    ):
        with pytest.raises(Conflict) as caught:
            await call
        assert caught.value.code == "stale_generation"
    with pytest.raises(Conflict) as caught:
        await node.client.create(asking(generation=4))
    assert caught.value.code == "wrong_state"
    await node.client.delete(A, generation=5)
    with pytest.raises(Conflict) as caught:  # a create that was late on its way
        await node.client.create(asking(generation=3))
    assert caught.value.code == "stale_generation"
    assert (await node.client.create(asking(generation=6))).generation == 6


async def test_bad_values_are_named(node, asking):
    with pytest.raises(NotFound) as caught:
        await node.client.create(asking(template="missing"))
    assert caught.value.code == "template_not_found"
    with pytest.raises(SetupRequired) as caught:
        await node.client.create(asking(runtime="microvm"))
    assert caught.value.code == "runtime_unavailable"
    with pytest.raises(NotFound):
        await node.client.get("b" * 20)
    with pytest.raises(NotFound):
        await node.client.stats("../../etc")
    await node.client.delete("b" * 20, generation=1)


@pytest.mark.parametrize(
    "change",
    [{"id": "../../../../etc/passwd"}, {"hostname": "a;b"}, {"cpu": "1; rm"}, {"netns": "/proc/1/ns/net"}, {"cpu": 0}],
)
async def test_no_path_or_unknown_field_crosses(node, asking, change):
    transport = httpx2.AsyncHTTPTransport(uds=str(node.settings.node_socket))
    async with httpx2.AsyncClient(transport=transport, base_url="http://node") as http:
        answer = await http.post("/v1/sandboxes", json=asking().model_dump() | change)
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "invalid_request"
        answer = await http.post("/v1/sandboxes", content=b" " * 2_000_000)
        assert answer.json()["error"]["code"] == "body_too_large"
        answer = await http.get("/v2/nothing")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        answer = await http.delete(f"/v1/sandboxes/{A}", params={"generation": "x"})
        assert answer.status_code == 422


async def test_room_is_limited(settings, asking):
    small = settings.model_copy(update={"max_sandboxes": 2})
    async with fake_node(small) as node:
        results = await asyncio.gather(
            *(node.client.create(asking(letter)) for letter in "abc"), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, CapacityExceeded)]
        assert len(refused) == 1
        assert refused[0].details["limit"] == "max_sandboxes"
        for facts in await node.client.list():
            await node.client.delete(facts.id, generation=1)
        await node.client.create(asking("c"))
        await node.client.delete("c" * 20, generation=1)


async def test_delete_ends_a_create_that_goes_on(settings, asking):
    deleting: list[asyncio.Task[None]] = []

    def delete_now(point: str) -> None:
        deleting.append(asyncio.get_running_loop().create_task(node.client.delete(A, generation=1)))

    faults = Faults("create.disk.before", action=delete_now)
    async with fake_node(settings, checkpoint=faults) as node:
        original = node.parts.slots.take

        async def slow_take(sandbox_id, policy, **values):
            await deleting_has_come(node)
            return await original(sandbox_id, policy, **values)

        node.parts.slots.take = slow_take
        with pytest.raises(Conflict, match="cannot create"):
            await node.client.create(asking())
        await asyncio.gather(*deleting)
        await assert_nothing_left(settings, node.parts)
        assert "create.start.before" not in faults.seen
        with pytest.raises(Conflict) as caught:
            await node.client.create(asking())
        assert caught.value.code == "stale_generation"


async def deleting_has_come(node) -> None:
    task = node.service._creating._going_on[A]
    while not task.cancelling():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def test_a_create_goes_on_when_its_caller_hangs_up(node, asking):
    call = asyncio.create_task(node.client.create(asking()))
    await until(lambda: node.service._creating._going_on or node.service.ledger.all())
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert (await node.client.get(A)).alive


async def test_deaths_are_told_at_once(node, asking):
    await node.client.create(asking())
    known = await node.client.changes(0)
    assert [facts.id for facts in known.changes] == [A]
    waiting = asyncio.create_task(node.client.changes(known.seq, wait_s=60))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    pid = node.service.ledger.find(A).process.pid
    os.kill(pid, 9)
    heard = await asyncio.wait_for(waiting, 20)
    assert [(facts.id, facts.alive, facts.exit_reason) for facts in heard.changes] == [(A, False, "its process ended")]
    with pytest.raises(SandboxGone) as caught:
        await node.dial.dial(A, 1)
    assert caught.value.code == "sandbox_lost"
    repeat = await node.client.create(asking())
    assert not repeat.alive
    await node.client.delete(A, generation=1)
    await assert_nothing_left(node.settings, node.parts)


async def test_changes_time_out_empty_and_tell_of_deletes(node, asking):
    empty = await node.client.changes(0, wait_s=0)
    assert empty.changes == []
    assert (await node.client.changes(empty.seq, wait_s=0.01)).changes == []
    await node.client.create(asking())
    await node.client.delete(A, generation=1)
    heard = await node.client.changes(empty.seq, wait_s=0)
    assert [(facts.alive, facts.exit_reason) for facts in heard.changes] == [(False, "it was deleted")]
    beyond = await node.client.changes(heard.seq + 10**12, wait_s=5)
    assert (beyond.seq, len(beyond.changes)) == (heard.seq, 1)


async def test_a_runtime_without_probe_is_unavailable(settings, asking, monkeypatch):
    async def broken(self):
        raise RuntimeError("no such device")

    monkeypatch.setattr(FakeRuntime, "probe", broken)
    async with fake_node(settings) as node:
        with pytest.raises(SetupRequired, match="cannot use runtime") as caught:
            await node.client.create(asking())
        assert "no such device" in caught.value.why
        facts = await node.client.facts()
        assert [(runtime.available, runtime.reason) for runtime in facts.runtimes] == [
            (False, "the probe failed: no such device")
        ]


async def test_an_unforeseen_fault_answers_with_a_number_of_the_log(node):
    async def broken(sandbox_id):
        raise RuntimeError("secret detail")

    node.service.get = broken
    with pytest.raises(PlatformError) as caught:
        await node.client.get(A)
    assert caught.value.code == "internal"
    assert "secret" not in json.dumps(caught.value.body())


async def test_a_node_that_is_down_says_so(settings):
    from cpuos.node.client import DialClient, LocalNodeClient

    async with LocalNodeClient(settings.node_socket) as client:
        for call in (client.list(), DialClient(settings.dial_socket).dial(A, 1)):
            with pytest.raises(CpuosError) as caught:
                await call
            assert (caught.value.code, caught.value.hint) == ("node_unavailable", "cpuos up")


async def test_marks_of_deleted_sandboxes_are_forgotten_after_a_while(node, asking):
    await node.client.create(asking())
    await node.client.delete(A, generation=1)
    await node.service.sweep()
    assert node.service.ledger.find(A) is not None
    later = datetime.now(UTC) + GONE_KEPT
    node.service.ledger.clock = lambda: later
    await node.service.sweep()
    assert node.service.ledger.find(A) is None
    assert list((node.settings.node_state_dir / "journal").iterdir()) == []


async def test_what_is_left_of_one_is_removed_before_its_next_generation_is_made(node, asking, monkeypatch):
    """A sweep whose list is older than the end of a delete, and a sandbox that is made anew under its id."""
    await node.client.create(asking())
    assembly, disks, order = node.service._assembly, node.parts.disks, []
    listed, reached, gate = await assembly.leftovers(), asyncio.Event(), asyncio.Event()
    await node.client.delete(A, generation=1)
    remove, create = disks.remove, disks.create

    async def leftovers():
        return listed

    async def remove_late(sandbox_id):
        reached.set()
        await gate.wait()
        await remove(sandbox_id)
        order.append("removed")

    async def create_noted(sandbox_id, **values):
        order.append("created")
        return await create(sandbox_id, **values)

    monkeypatch.setattr(assembly, "leftovers", leftovers)
    monkeypatch.setattr(disks, "remove", remove_late)
    monkeypatch.setattr(disks, "create", create_noted)
    sweep = asyncio.create_task(node.service.sweep())
    await reached.wait()
    making = asyncio.create_task(node.client.create(asking(generation=2)))
    await until(lambda: node.service.ledger.find(A).generation == 2)
    for _ in range(1000):  # as far as it comes
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(sweep, making)
    assert order == ["removed", "created"]
    assert disks.path(A).is_dir()
    await node.service.sweep()  # of one that is there again nothing is removed, whatever the list says
    assert order == ["removed", "created"]
    assert (await node.client.get(A)).alive


async def test_a_sandbox_has_one_lock_whoever_lets_go_of_it(node, asking, monkeypatch):
    """Of three that come one after the other, while sweep or delete of a snapshot forget what is over, two never work
    at once."""
    service, ledger = node.service, node.service.ledger
    assembly, inside, most = service._assembly, 0, 0

    async def leftovers():
        return [A]

    async def work(key):
        nonlocal inside, most
        async with ledger.lock(key):
            inside += 1
            most = max(most, inside)
            for _ in range(20):
                await asyncio.sleep(0)
            inside -= 1

    async def slowly(*steps, **values):
        await asyncio.sleep(0.01)

    monkeypatch.setattr(assembly, "leftovers", leftovers)
    monkeypatch.setattr("cpuos.node.upkeep.run_steps", slowly)
    for lets_go, key in ((service.sweep, A), (lambda: service.delete_snapshot(A), f"snapshot {A}")):
        going = asyncio.create_task(lets_go())
        while not ledger.lock(key).locked():  # noqa: ASYNC110 (a moment, in which nothing else comes between)
            await asyncio.sleep(0)
        waiting = asyncio.create_task(work(key))
        await asyncio.sleep(0)
        await going
        await asyncio.gather(waiting, work(key))
    assert most == 1
