"""The volume is full: sandboxes stand still and nothing is begun, the ballast is given; with room they go on."""

from __future__ import annotations

import os

import pytest

from cpuos.errors import CapacityExceeded
from cpuos.node.storage.ballast import Ballast
from cpuos.node.storage.room import volume_bytes
from cpuos.node.volume import VolumeWatch
from cpuos.testing.node import fake_node, fake_settings
from cpuos.testing.waiting import until
from cpuos.types.node import NodeSandboxCreate

MIB = 1 << 20


def create(sandbox_id: str) -> NodeSandboxCreate:
    return NodeSandboxCreate(
        id=sandbox_id,
        generation=1,
        template="python",
        runtime="fake",
        hostname="box",
        cpu=1,
        memory_mib=128,
        disk_mib=64,
        max_processes=64,
    )


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


async def test_all_stand_still_until_there_is_room():
    free, told = [1 << 40], []
    async with fake_settings() as settings, fake_node(settings) as node:
        service = node.service
        await service._volume_watch.close()  # this test looks by itself
        watch = VolumeWatch(
            service._kit.volume,
            ledger=service.ledger,
            runtimes=service._kit.runtimes,
            tell=lambda sandbox_id, halted: told.append((sandbox_id, halted)),
            free=lambda folder: free[0],
        )
        volume = service._kit.volume
        for letter in "ab":
            await service.create(create(letter * 20))
        pids = [record.process.pid for record in service.ledger.all()]
        await watch.look(again=True)
        assert volume.ballast.held_bytes >= volume.ballast.size_bytes > 0
        assert not told

        free[0] = 0
        await watch.look()
        for pid in pids:
            await until(lambda pid=pid: state_of(pid) == "T")
        assert sorted(told) == [("a" * 20, True), ("b" * 20, True)]
        assert volume.ballast.held_bytes == 0
        assert (await node.client.facts()).volume.full
        for begin in (
            service.create(create("c" * 20)),
            service.pause("a" * 20, generation=1, freeze="0" * 32),
            service.keep_root("a" * 20, generation=1),
        ):
            with pytest.raises(CapacityExceeded, match="stand still"):
                await begin
        assert len(service.list()) == 2
        await service.delete("b" * 20, generation=1)  # an end needs no room
        free[0] = volume.mark_bytes  # not yet: it would be full again at once
        await watch.look()
        assert volume.full
        assert state_of(pids[0]) == "T"

        free[0] = 1 << 40
        told.clear()
        await watch.look()
        assert not volume.full
        await until(lambda: state_of(pids[0]) != "T")
        assert ("a" * 20, False) in told
        assert volume.ballast.held_bytes >= volume.ballast.size_bytes
        await service.create(create("c" * 20))


async def test_what_a_daemon_left_standing_goes_on_under_the_next():
    async with fake_settings() as settings:
        async with fake_node(settings) as node:
            await node.service.create(create("a" * 20))
            pid = node.service.ledger.find("a" * 20).process.pid
            await node.parts.runtimes["fake"].halt("a" * 20)
            await until(lambda: state_of(pid) == "T")
        async with fake_node(settings):
            await until(lambda: state_of(pid) != "T")


def test_ballast_is_no_more_than_a_share_of_the_volume(tmp_path):
    ballast = Ballast(tmp_path / "ballast", size_bytes=1 << 60)
    assert ballast.size_bytes == volume_bytes(tmp_path) // 20


def test_ballast_is_made_where_enough_is_left(tmp_path):
    ballast = Ballast(tmp_path / "ballast", size_bytes=3 * MIB)
    assert not ballast.take(leave=1 << 60)
    assert ballast.held_bytes == 0
    assert ballast.take(leave=0)
    assert ballast.take(leave=1 << 60)  # it is there
    assert ballast.held_bytes >= 3 * MIB
    ballast.give()
    assert (ballast.held_bytes, os.listdir(tmp_path)) == (0, ["ballast"])
    ballast.give()
