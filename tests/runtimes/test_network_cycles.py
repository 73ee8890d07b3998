"""Sandboxes come and go on a real node: nothing of their network is left, however they, workers or the node end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cpuos.node.client import LocalNodeClient
from cpuos.node.network.plan import host_link, host_table
from cpuos.testing.sealed import SealedInstance, SealedWorld
from cpuos.testing.waiting import until
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer
from cpuos.types.node import NodeSandboxCreate

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(600)]

POLICIES = [
    NetworkPolicy(),
    NetworkPolicy(mode="off"),
    NetworkPolicy(allow=["*.allowed.example", "93.184.215.0/24:443"], deny=["bad.allowed.example"]),
]


@pytest.fixture(scope="module")
def instance(sealed: SealedWorld) -> Iterator[SealedInstance]:
    with sealed.instance(runtime="gvisor", max_sandboxes=8, network_pool=2) as instance:
        yield instance


@pytest.fixture
async def client(instance: SealedInstance) -> AsyncIterator[LocalNodeClient]:
    async with LocalNodeClient(instance.settings.node_socket) as client:
        yield client


def request(letter: str, number: int) -> NodeSandboxCreate:
    policy = POLICIES[number % len(POLICIES)]
    return NodeSandboxCreate(
        id=letter * 20,
        generation=int(time.time() * 1000),
        template="base",
        runtime="gvisor",
        hostname="box",
        cpu=1,
        memory_mib=256,
        disk_mib=64,
        max_processes=64,
        network=EffectivePolicy(version=1, layers=[PolicyLayer(origin="sandbox", policy=policy)]),
    )


class View:
    """What an instance's network is made of, seen from outside."""

    def __init__(self, sealed: SealedWorld, instance: SealedInstance) -> None:
        self._sealed, self._instance = sealed, instance
        self._node = Path(f"/proc/{instance.pids()['node']}")
        self._folder = instance.settings.run_dir / "netns"

    def take(self) -> dict[str, object]:
        link = host_link(self._instance.settings.instance_id)
        host = self._sealed.run_in_host
        return {
            "names": sorted(name for name in self._names() if not name.isdigit()),
            "slots": sum(name.isdigit() for name in self._names()),
            "mounts": self._mounts(),
            "slot links": len([row for row in self._hub("ip", "-br", "link").splitlines() if row.startswith("u")]),
            "slot routes": len([row for row in self._hub("ip", "route").splitlines() if "dev u" in row]),
            "neighbours": len([row for row in self._hub("ip", "neigh").splitlines() if "dev u" in row]),
            "hub rules": self._without_counts(self._hub("nft", "list", "ruleset")),
            "host links": [row.split()[0] for row in host(["ip", "-br", "link"]).stdout.splitlines()],
            "host routes": sorted(host(["ip", "route", "show", "table", "all"]).stdout.splitlines()),
            "host rules": self._without_counts(host(["nft", "list", "ruleset"]).stdout),
            "own link": link in host(["ip", "-br", "link"]).stdout,
            "processes": self._processes(),
            "descriptors of the node": self._descriptors(),
        }

    def _names(self) -> list[str]:
        return os.listdir(self._node / "root" / str(self._folder).lstrip("/"))

    def _mounts(self) -> int:
        return (self._node / "mountinfo").read_text().count(f"{self._folder}/")

    def _hub(self, *argv: str) -> str:
        # Twice: the hub's name is to be found only in the node's mount namespace.
        into = ["nsenter", f"--mount={self._node}/ns/mnt", "nsenter", f"--net={self._folder}/hub", *argv]
        return self._sealed.run_in_host(into).stdout

    @staticmethod
    def _without_counts(rules: str) -> list[str]:
        return [line for line in rules.splitlines() if "counter" not in line]

    def _processes(self) -> int:
        node = int(self._node.name)
        count = 0
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                count += int(Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()[1]) == node
            except OSError:
                continue
        return count

    def _descriptors(self) -> int:
        return len(os.listdir(self._node / "fd"))


async def settled(view: View, wanted: dict[str, object], *, limit_s: float = 60.0) -> dict[str, object]:
    """The view once it is as it was, or what it is in the end: the kernel takes links away a moment later."""
    deadline = time.monotonic() + limit_s
    while True:
        seen = await asyncio.to_thread(view.take)
        within = {**seen, "descriptors of the node": 0} == {**wanted, "descriptors of the node": 0}
        # A few come and go with connections; that they do not grow with each cycle is what counts.
        few = abs(int(str(seen["descriptors of the node"])) - int(str(wanted["descriptors of the node"]))) <= 6
        if (within and few) or time.monotonic() > deadline:
            return {**seen, **({"descriptors of the node": wanted["descriptors of the node"]} if few else {})}
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("cycles", [60, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_cycles_leave_nothing(sealed, instance, client, cycles):
    warm = request("w", 2)
    await client.create(warm)
    await client.delete(warm.id, generation=warm.generation)
    view = View(sealed, instance)

    async def at_rest() -> dict[str, object] | None:
        seen = await asyncio.to_thread(view.take)
        return seen if seen["slots"] == seen["slot links"] == seen["slot routes"] == 2 else None  # the pool's

    await asyncio.sleep(1)
    before = await until(at_rest)
    assert before["own link"]
    for number in range(cycles // 2):
        pair = [request("a", number), request("b", number + 1)]
        await asyncio.gather(*(client.create(one) for one in pair))
        newer = EffectivePolicy(version=2, layers=pair[1].network.layers)
        await client.update_network(pair[0].id, generation=pair[0].generation, policy=newer)
        await asyncio.gather(*(client.delete(one.id, generation=one.generation) for one in pair))
    assert await settled(view, before) == before
    assert instance.leftovers() == []


async def test_a_killed_node_takes_over_and_leaves_nothing(sealed, instance, client):
    view = View(sealed, instance)
    before = await asyncio.to_thread(view.take)
    kept = request("c", 0)
    await client.create(kept)
    instance.kill("node")
    await asyncio.to_thread(instance.wait_ready)
    view = View(sealed, instance)
    assert (await client.get(kept.id)).alive
    await client.delete(kept.id, generation=kept.generation)
    seen = await settled(view, before)
    for name in ("descriptors of the node", "processes"):
        seen.pop(name), before.pop(name)
    assert seen == before


async def test_what_is_on_the_host_goes_with_the_instance(sealed):
    with sealed.instance(runtime="gvisor", max_sandboxes=2, network_pool=1) as instance:
        link, table = host_link(instance.settings.instance_id), host_table(instance.settings.instance_id)
        assert link in sealed.run_in_host(["ip", "-br", "link"]).stdout
        assert table in sealed.run_in_host(["nft", "list", "tables"]).stdout
        assert sealed.run_in_host(["sysctl", "-n", "net.ipv4.ip_forward"]).stdout.strip() == "1"
    assert link not in sealed.run_in_host(["ip", "-br", "link"]).stdout
    assert table not in sealed.run_in_host(["nft", "list", "tables"]).stdout
