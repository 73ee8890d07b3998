"""A change of policy opens what its guest was told of names, whenever it comes: before, while or after the slot is
handed to workers that begin anew, after a restart of the daemon or of one worker."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from cpuos.node.network.namespaces import inside
from cpuos.node.network.network import Network, NetworkConfig
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.policy_rules import NamedAddress
from cpuos.node.network.slot import router_name
from cpuos.node.network.worker_set import DNS, PEEK, RECORDS, WorkerSet
from cpuos.node.network.workers.supervisor import Worker
from cpuos.testing.waiting import until
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="needs root"), pytest.mark.timeout(120)]
ID, OTHER = "a" * 20, "b" * 20
NAME, ADDRESS = "web.allowed.example", IPv4Address("93.184.215.14")
TOLD = NamedAddress(name=NAME, address=ADDRESS, ttl_s=300)
MOMENTS = ["before", "while", "after"]


def policy(version: int, *allow: str) -> EffectivePolicy:
    listed = NetworkPolicy.model_validate({"mode": "allowlist", "allow": list(allow)})
    return EffectivePolicy(version=version, layers=[PolicyLayer(origin="sandbox", policy=listed)])


WIDE, NARROW, ELSE = policy(1, "*.allowed.example"), policy(2, NAME), policy(3, "else.example")


class Doors:
    """Where the handing over of slots is held up: `replay` before a slot's lock is taken, `hand_over` while it is."""

    def __init__(self) -> None:
        self.replay, self.hand_over = asyncio.Event(), asyncio.Event()
        self.at_hand_over = asyncio.Event()
        self.of = ""
        """To which worker; to all where it is empty."""
        self.open()

    def open(self) -> None:
        self.replay.set()
        self.hand_over.set()

    def shut(self, moment: str) -> None:
        self.at_hand_over.clear()
        if moment == "before":
            self.replay.clear()
        elif moment == "while":
            self.hand_over.clear()


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Doors:
    doors = Doors()

    def behind(method: Callable[..., Any]) -> Callable[..., Any]:
        async def wait(*arguments: Any) -> Any:
            await doors.replay.wait()
            return await method(*arguments)

        return wait

    for name in ("open", "_replay"):
        monkeypatch.setattr(WorkerSet, name, behind(getattr(WorkerSet, name)))
    hand_over = WorkerSet._hand_over

    async def wait(workers: WorkerSet, worker: Worker, *arguments: Any) -> None:
        if worker.name == doors.of or not doors.of:
            doors.at_hand_over.set()
            await doors.hand_over.wait()
        await hand_over(workers, worker, *arguments)

    monkeypatch.setattr(WorkerSet, "_hand_over", wait)
    return doors


@pytest.fixture
def folder() -> Iterator[Path]:
    """A worker of another user has to get to its journal, which it does not below tmp_path."""
    with tempfile.TemporaryDirectory(prefix="cpuos-names-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
async def begin(folder: Path, doors: Doors) -> AsyncIterator[Callable[[], Any]]:
    begun: list[Network] = []

    async def start() -> Network:
        if begun:
            await begun[-1].close()
        network = Network(
            NetworkConfig(
                folder=folder / "netns",
                instance_id="7e57ee",
                block="auto",
                uplink="none",
                exceptions=(),
                dns_servers=("1.1.1.1",),
                pool=0,
                max_sandboxes=8,
                state_dir=folder / "state",
                socket_path=folder / "network.sock",
            )
        )
        begun.append(network)
        await network.start()
        return network

    yield start
    doors.open()
    for sandbox_id in await begun[-1].leftovers():
        await begun[-1].release(sandbox_id)
    await begun[-1].close()
    await asyncio.to_thread(begun[-1].remove)


async def take(network: Network) -> None:
    await network.take(ID, WIDE)
    await until(lambda: is_served(network, ID))
    await network._slots[ID].learn([TOLD])
    assert opened(network) == {str(ADDRESS)}


def is_served(network: Network, sandbox_id: str) -> bool:
    served = network._slots[sandbox_id].opened
    return all(
        worker.is_ready and served.get(name) == network.workers._processes[name]
        for name, worker in network.workers.workers.items()
    )


def opened(network: Network) -> set[str]:
    """Which addresses the kernel has open for names."""

    def read() -> list[dict[str, Any]]:
        context = NftContext()
        try:
            return context.query("list ruleset ip")
        finally:
            context.close()

    entries = inside(router_name(network._slots[ID].folder), read)
    sets = [entry["set"] for entry in entries if entry.get("set", {}).get("name", "").startswith("named_")]
    return {element["elem"]["val"] for one in sets for element in one.get("elem", [])}


async def told_by_forwarder(network: Network, holds: EffectivePolicy) -> list[str]:
    return [row.name for row in await network.workers.change(ID, holds) if row.ttl_s > 0]


async def change(network: Network, doors: Doors, moment: str, *, has_come: Callable[[], bool]) -> None:
    """Put `NARROW` in place at this moment of the handing over, to which workers come when `has_come` says so."""
    if moment == "after":
        await until(lambda: is_served(network, ID))
        await network.update(ID, NARROW)
        return
    if moment == "before":
        await until(has_come)
        await network.update(ID, NARROW)
        assert opened(network) == {str(ADDRESS)}, "before anything was handed over"
        doors.open()
        return
    await doors.at_hand_over.wait()
    changing = asyncio.create_task(network.update(ID, NARROW))
    await asyncio.sleep(0)
    doors.open()
    await changing


async def check(network: Network, *, forwarder_is_new: bool) -> None:
    await until(lambda: is_served(network, ID))
    assert opened(network) == {str(ADDRESS)}
    if forwarder_is_new:  # the first one was never asked, in these tests
        assert await told_by_forwarder(network, NARROW) == [NAME]
    await network.update(ID, ELSE)
    assert opened(network) == set()
    await network.update(ID, WIDE)
    assert opened(network) == {str(ADDRESS)}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_after_a_restart_of_the_daemon(begin, doors, moment):
    await take(await begin())
    doors.shut(moment)
    network = await begin()
    adopting = asyncio.create_task(network.readopt(ID, WIDE))
    await until(lambda: ID in network._slots)
    await change(network, doors, moment, has_come=lambda: all(one.is_ready for one in network.workers.workers.values()))
    await adopting
    await check(network, forwarder_is_new=True)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", [DNS, PEEK, RECORDS])
async def test_after_a_death_of_a_worker(begin, doors, moment, name):
    network = await begin()
    await take(network)
    doors.shut(moment)
    worker, before = network.workers.workers[name], network.workers._processes[name]
    os.kill(worker.pid, signal.SIGKILL)
    # It takes calls as soon as it was told to start, which is before it was given any slot.
    await change(
        network,
        doors,
        moment,
        has_come=lambda: network.workers._processes[name] > before and worker._calls is not None,
    )
    await check(network, forwarder_is_new=name == DNS)


async def test_a_slot_taken_while_a_worker_is_given_the_others_is_given_too(begin, doors):
    network = await begin()
    await take(network)
    doors.of = DNS
    doors.shut("while")
    os.kill(network.workers.workers[DNS].pid, signal.SIGKILL)
    await doors.at_hand_over.wait()
    taking = asyncio.create_task(network.take(OTHER, WIDE))
    await taking
    doors.open()
    await until(lambda: is_served(network, OTHER))
