"""The daemon as a process: killed at every step, started again, stopped, started twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from cpuos.errors import CpuosError
from cpuos.node.client import DialClient
from cpuos.runtimes.processes import find_process
from cpuos.settings import Settings
from cpuos.testing.daemons import Daemon, DaemonForker
from cpuos.testing.faults import assert_nothing_left
from cpuos.testing.node import fake_parts

A, B = "a" * 20, "b" * 20
CREATE_POINTS = [
    f"create.{step}.{side}"
    for step in ("record", "workdir", "disk", "slot", "start", "running")
    for side in ("before", "after")
]
DELETE_POINTS = [
    f"delete.{step}.{side}"
    for step in ("record", "destroy", "slot", "disk", "workdir", "gone")
    for side in ("before", "after")
]


@pytest.fixture(scope="module")
def forker() -> Iterator[DaemonForker]:
    with DaemonForker() as forker:
        yield forker


@pytest.fixture
def daemon(forker: DaemonForker, settings: Settings) -> Callable[..., Daemon]:
    def start(*, kill_at: str = "") -> Daemon:
        settings.node_socket.unlink(missing_ok=True)
        return Daemon(forker.start(settings, kill_at=kill_at), settings)

    return start


async def test_a_killed_daemon_finds_its_sandboxes_again(daemon, settings, asking):
    async with daemon() as first:
        facts = [await first.client.create(asking(letter)) for letter in "ab"]
        dialled = await DialClient(settings.dial_socket).dial(A, 1)
        dialled.socket.close()
        pids = fake_parts(settings).runtimes["fake"]
        first.process.kill()
    killed = pids._read_process(B)
    os.kill(killed.pid, signal.SIGKILL)
    while find_process(killed.pid) == killed:  # noqa: ASYNC110 (the signal may not have been carried out)
        await asyncio.sleep(0.001)
    async with daemon() as second:
        found = {facts.id: facts for facts in await second.client.list()}
        assert found[A] == facts[0]
        assert not found[B].alive
        assert found[B].exit_reason == "its process ended while the node daemon was down"
        again = await DialClient(settings.dial_socket).dial(A, 1)
        again.socket.connect(again.address)
        again.socket.close()
        assert again.session_key == dialled.session_key  # the guest accepts a repeat only with the same key
        after = (await second.client.changes(0)).seq
        os.kill(pids._read_process(A).pid, signal.SIGKILL)  # its death is watched again
        heard = await second.client.changes(after, wait_s=30)
        assert [(facts.id, facts.alive) for facts in heard.changes] == [(A, False)]
        for letter in "ab":
            await second.client.delete(letter * 20, generation=1)
        await assert_nothing_left(settings, fake_parts(settings))


@pytest.mark.parametrize("point", CREATE_POINTS)
async def test_killed_inside_create(daemon, settings, asking, point):
    async with daemon(kill_at=point) as first:
        with pytest.raises(CpuosError) as caught:
            await first.client.create(asking())
        assert caught.value.code == "node_unavailable"
    async with daemon() as second:
        if point == "create.running.after":  # on disk: it exists, though its caller was never told
            assert [facts.alive for facts in await second.client.list()] == [True]
        else:
            await assert_nothing_left(settings, fake_parts(settings))
        assert (await second.client.create(asking())).alive
        await second.client.delete(A, generation=1)
        await assert_nothing_left(settings, fake_parts(settings))


@pytest.mark.parametrize("point", DELETE_POINTS)
async def test_killed_inside_delete(daemon, settings, asking, point):
    async with daemon(kill_at=point) as first:
        await first.client.create(asking())
        with pytest.raises(CpuosError):
            await first.client.delete(A, generation=1)
    async with daemon() as second:
        if point != "delete.record.before":
            await assert_nothing_left(settings, fake_parts(settings))
        await second.client.delete(A, generation=1)
        await assert_nothing_left(settings, fake_parts(settings))


async def test_a_stopped_daemon_leaves_sandboxes_running(daemon, settings, asking):
    async with daemon() as first:
        await first.client.create(asking())
    assert first.process.returncode == 0
    assert first.process.log()[-1]["event"] == "node stops"
    async with daemon() as second:
        assert [facts.alive for facts in await second.client.list()] == [True]
        await second.client.delete(A, generation=1)


async def test_a_second_daemon_is_refused(daemon, settings, asking):
    async with daemon() as first:
        other = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "cpuos.testing.node"],
            env=os.environ | settings.environment(),
            capture_output=True,
            text=True,
        )
        assert other.returncode != 0
        assert "cannot start the node daemon" in other.stderr
        assert str(first.process.pid) in other.stderr
        await first.client.create(asking())  # its socket was not taken away
        await first.client.delete(A, generation=1)


async def test_the_host_restarted(daemon, settings, asking):
    async with daemon() as first:
        await first.client.create(asking())
        first.process.kill()
    path = settings.node_state_dir / "journal" / f"{A}.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"boot_id": "of an earlier boot"}))
    async with daemon() as second:
        facts = await second.client.get(A)
        assert (facts.alive, facts.exit_reason) == (False, "the host restarted")
        await second.client.delete(A, generation=1)
        await assert_nothing_left(settings, fake_parts(settings))


@pytest.mark.parametrize("text", ["", '{"request": {', "[]", '{"request": {"id": "x"}}'])
async def test_a_damaged_record_is_an_orphan(daemon, settings, asking, text):
    async with daemon() as first:
        await first.client.create(asking())
        await first.client.create(asking("b"))
        first.process.kill()
    path = settings.node_state_dir / "journal" / f"{A}.json"
    path.write_text(text)
    (path.parent / f"{B}.draft").write_text("half")
    async with daemon() as second:
        assert [facts.id for facts in await second.client.list()] == [B]
        assert path.with_suffix(".unreadable").read_text() == text
        path.with_suffix(".unreadable").unlink()
        assert (await second.client.create(asking())).alive
        for letter in "ab":
            await second.client.delete(letter * 20, generation=1)
        await assert_nothing_left(settings, fake_parts(settings))


async def test_orphans_are_removed_at_start(daemon, settings, asking):
    parts = fake_parts(settings)
    await parts.disks.create(A, size_mib=64)
    await parts.slots.take(B, asking().network)
    (settings.node_state_dir / "sandboxes" / ("c" * 20)).mkdir(parents=True)
    async with daemon():
        await assert_nothing_left(settings, parts)
