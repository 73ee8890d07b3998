"""The daemon with a pool as a process, killed at every step: what it finds then is ready, taken or not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from cpuos.errors import CpuosError
from cpuos.settings import Settings
from cpuos.testing.daemons import Daemon, DaemonForker
from cpuos.testing.faults import assert_nothing_left
from cpuos.testing.node import fake_parts, fake_settings
from cpuos.types.node import NodeSandboxCreate, ReadySandbox
from cpuos.types.sandbox import StartedFrom

FILL_POINTS = [
    f"fill.{step}.{side}"
    for step in ("record", "workdir", "disk", "slot", "start", "agent", "ready")
    for side in ("before", "after")
]
TAKE_POINTS = [f"take.{step}.{side}" for step in ("record", "network") for side in ("before", "after")]


class PoolDaemon(Daemon):
    async def ready(self) -> ReadySandbox:
        """The one that is kept ready, once it is."""
        pool = await self.client.pool(0, wait_s=0)
        while not pool.ready:
            pool = await self.client.pool(pool.seq)
        (ready,) = pool.ready
        return ready


@pytest.fixture(scope="module")
def forker() -> Iterator[DaemonForker]:
    with DaemonForker() as forker:
        yield forker


@pytest.fixture
async def settings() -> AsyncIterator[Settings]:
    async with fake_settings(pool_memory_mib=256, pool_keep=["python=1"]) as settings:
        yield settings


@pytest.fixture
def daemon(forker: DaemonForker, settings: Settings) -> Callable[..., PoolDaemon]:
    def start(*, kill_at: str = "") -> PoolDaemon:
        settings.node_socket.unlink(missing_ok=True)
        return PoolDaemon(forker.start(settings, kill_at=kill_at), settings)

    return start


def naming(ready: ReadySandbox) -> NodeSandboxCreate:
    values = ready.model_dump(exclude={"template_digest"})
    return NodeSandboxCreate(**values, generation=1, hostname=ready.id)


@pytest.mark.parametrize("point", FILL_POINTS)
async def test_killed_inside_fill(daemon, settings, point):
    killed = daemon(kill_at=point)
    await asyncio.to_thread(killed.process.wait)
    await killed.client.aclose()
    async with daemon() as second:
        assert await second.client.list() == []
        ready = await second.ready()
        assert (await second.client.create(naming(ready))).started_from is StartedFrom.POOL
        await second.client.delete(ready.id, generation=1)
    await assert_nothing_left(settings, fake_parts(settings))


@pytest.mark.parametrize("point", TAKE_POINTS)
async def test_killed_inside_take(daemon, settings, point):
    async with daemon(kill_at=point) as first:
        ready = await first.ready()
        with pytest.raises(CpuosError) as caught:
            await first.client.create(naming(ready))
        assert caught.value.code == "node_unavailable"
    async with daemon() as second:
        if point == "take.record.before":
            assert await second.client.list() == []
            assert (await second.ready()).id == ready.id
        else:
            assert [one.id for one in await second.client.list()] == [ready.id]
        facts = await second.client.create(naming(ready))
        assert (facts.alive, facts.started_from) == (True, StartedFrom.POOL)
        await second.client.delete(ready.id, generation=1)
    await assert_nothing_left(settings, fake_parts(settings))


async def test_a_killed_daemon_finds_what_is_ready_again(daemon, settings):
    async with daemon() as first:
        ready = await first.ready()
        first.process.kill()
    async with daemon() as second:
        assert await second.ready() == ready
    await assert_nothing_left(settings, fake_parts(settings))


async def test_it_is_filled_again_after_a_take(daemon, settings):
    async with daemon() as only:
        ready = await only.ready()
        taken = await only.client.create(naming(ready))
        assert taken.id == ready.id
        assert (await only.ready()).id != ready.id
        facts = (await only.client.facts()).pool
        assert (facts.taken, facts.missed, facts.budget_mib) == (1, 0, 256)
        await only.client.delete(taken.id, generation=1)
    await assert_nothing_left(settings, fake_parts(settings))
