"""Slots on this host: namespaces, links and names; nothing in the host's own namespace where there is no uplink."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from cpuos.errors import Conflict, InvalidRequest, NotFound, PlatformError
from cpuos.node.network.namespaces import inside
from cpuos.node.network.network import Network, NetworkConfig
from cpuos.node.network.plan import GUEST_MAC
from cpuos.node.network.tap import open_tap
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="needs root"), pytest.mark.timeout(120)]
ID, OTHER = "a" * 20, "b" * 20


def policy(version: int = 1, **values) -> EffectivePolicy:
    return EffectivePolicy(
        version=version, layers=[PolicyLayer(origin="sandbox", policy=NetworkPolicy.model_validate(values))]
    )


def mountinfo() -> str:
    return Path("/proc/self/mountinfo").read_text()


def config(folder: Path, **changes) -> NetworkConfig:
    values = {
        "folder": folder / "netns",
        "instance_id": "7e57ed",
        "block": "auto",
        "uplink": "none",
        "exceptions": (),
        "dns_servers": ("1.1.1.1",),
        "pool": 0,
        "max_sandboxes": 8,
        "state_dir": folder / "state",
        "socket_path": folder / "network.sock",
    }
    return NetworkConfig(**(values | changes))


class Quiet(Network):
    """Without workers: these tests are about slots."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        self.workers.workers.clear()


@pytest.fixture
async def network(tmp_path):
    host_links = socket.if_nameindex()
    network = Quiet(config(tmp_path))
    await network.start()
    yield network
    for sandbox_id in await network.leftovers():
        await network.release(sandbox_id)
    await network.close()
    await asyncio.to_thread(network.remove)
    assert socket.if_nameindex() == host_links
    assert os.listdir(tmp_path / "netns") == ["block"]
    assert str(tmp_path) not in mountinfo()


def names(path: Path) -> set[str]:
    return {name for _, name in inside(path, socket.if_nameindex)}


async def gone(hub: Path, device: str) -> bool:
    """Whether a slot's link leaves the hub, which takes the kernel a moment."""
    for _ in range(3000):
        if device not in names(hub):
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_slot_joins_hub_router_and_guest(network):
    path = await network.take(ID, policy())
    assert path == network.path(ID)
    assert names(path) == {"lo", "eth0"}
    assert names(path.parent / "router") == {"lo", "lan", "wan"}
    assert len(names(network._hub.path)) == 2

    def listen():
        server = socket.socket()
        server.bind(("10.0.0.2", 1))
        server.listen()
        return server

    with inside(path, listen) as server:
        link = await network.guest_link(ID)
        with link.socket:
            assert link.socket.getblocking() is False
            await asyncio.get_running_loop().sock_connect(link.socket, link.address)
            connection, peer = server.accept()
            connection.close()
            assert peer[0] == "10.0.0.1"


async def test_a_slot_with_a_tap_has_a_router_alone(network):
    """Whoever opens the tap is the guest; the device stays when nobody does, and goes with the slot."""
    path = await network.take(ID, policy(), tap=True)
    assert path == network.path(ID)
    assert names(path) == names(path.parent / "router") == {"lo", "lan", "wan"}
    assert os.stat(path).st_ino == os.stat(path.parent / "router").st_ino
    for _ in range(2):
        tap = inside(path, lambda: open_tap("lan"))
        link = await network.guest_link(ID)
        with link.socket:
            # The guest is not asked where it is: the first frame that comes out is the connection's own.
            with pytest.raises(BlockingIOError):
                link.socket.connect(link.address)
            frame = await asyncio.to_thread(read_frame, tap)
        os.close(tap)
        assert frame[:6] == bytes.fromhex(GUEST_MAC.replace(":", ""))
        assert frame[12:14] == b"\x08\x00"
        assert "lan" in names(path)
    await network.take(ID, policy())  # its slot may be of the other kind next time
    assert names(network.path(ID)) == {"lo", "eth0"}


def read_frame(tap: int) -> bytes:
    assert select.select([tap], [], [], 20)[0]
    return os.read(tap, 65536)


async def test_the_guest_has_one_way_out_and_no_ipv6(network):
    path = await network.take(ID, policy())

    def routes():
        return Path("/proc/thread-self/net/route").read_text().splitlines()[1:]

    assert [line.split()[1:3] for line in inside(path, routes)] == [["00000000", "0100000A"], ["0000000A", "00000000"]]
    addresses = inside(path, lambda: Path("/proc/thread-self/net/if_inet6").read_text())
    assert [line.split()[-1] for line in addresses.splitlines()] == ["lo"], "IPv6 only on loopback"


async def test_slots_are_apart_and_leave_nothing(network):
    await asyncio.gather(network.take(ID, policy()), network.take(OTHER, policy()))
    assert await network.leftovers() == [ID, OTHER]
    one = network._slots[ID].plan
    assert one != network._slots[OTHER].plan
    await network.release(ID)
    assert await network.leftovers() == [OTHER]
    with pytest.raises(NotFound):
        await network.guest_link(ID)
    assert await gone(network._hub.path, one.hub_device), "an open socket holds the namespace"


async def test_verbs_may_be_repeated_and_bear_nothing_there(network):
    await network.release(ID)
    await network.take(ID, policy())
    await network.take(ID, policy(2))
    kept = [line for line in mountinfo().splitlines() if str(network._folder) in line and "/guest" in line]
    assert len(kept) == 1
    await network.arm(ID)
    await network.arm(ID)
    await network.release(ID)
    await network.release(ID)
    with pytest.raises(NotFound):
        await network.update(ID, policy(3))


async def test_a_take_that_fails_leaves_nothing(network, monkeypatch):
    async def fail(*_: object) -> None:
        raise PlatformError("cannot do it")

    monkeypatch.setattr(network.workers, "open", fail)
    with pytest.raises(PlatformError):
        await network.take(ID, policy())
    assert await network.leftovers() == []
    assert not [name for name in os.listdir(network._folder) if name.isdigit()]


async def test_the_next_daemon_takes_slots_over_and_removes_what_was_in_store(network, tmp_path):
    await network.take(ID, policy())
    slot = network._slots[ID].plan
    (tmp_path / "netns" / "7").mkdir()  # made by a daemon that was killed before anybody took it
    await network.close()

    second = Quiet(config(tmp_path, block="auto"))
    await second.start()
    try:
        assert not (tmp_path / "netns" / "7").exists()
        with pytest.raises(NotFound):
            await second.update(ID, policy(2))
        await second.readopt(ID, policy(2, mode="off"))
        await second.readopt(ID, policy(2, mode="off"))
        assert second._slots[ID].plan == slot
        assert second._plan == network._plan
        with pytest.raises(PlatformError):
            await second.readopt(OTHER, policy())
        await second.release(ID)
        assert await gone(second._hub.path, slot.hub_device)
    finally:
        await second.close()


@pytest.mark.parametrize("problem", [OSError(16, "Device or resource busy"), PlatformError("cannot do it", "busy")])
async def test_a_kernel_that_is_busy_is_asked_again_before_a_sandbox_is_given_up(
    network, tmp_path, monkeypatch, problem
):
    monkeypatch.setattr("cpuos.node.network.network.READOPT_PAUSE_S", 0)
    await network.take(ID, policy())
    await network.close()
    second = Quiet(config(tmp_path, block="auto"))
    await second.start()
    take_up, failures = second._take_up, [problem] * 3

    async def fail_first(sandbox_id, wanted):
        if failures:
            raise failures.pop()
        await take_up(sandbox_id, wanted)

    monkeypatch.setattr(second, "_take_up", fail_first)
    try:
        await second.readopt(ID, policy(2))
        assert ID in second._slots
        failures += [problem] * 4
        await second._slots.pop(ID).close()
        with pytest.raises(PlatformError):
            await second.readopt(ID, policy(2))
        assert failures == []
    finally:
        monkeypatch.undo()
        await second.readopt(ID, policy(2))
        await second.release(ID)
        await second.close()


async def test_a_block_stays_while_it_is_in_use(network, tmp_path):
    await network.take(ID, policy())
    await network.close()
    second = Quiet(config(tmp_path, block="10.99.0.0/24"))
    await second.start()
    assert second._plan == network._plan
    await second.release(ID)
    await second.close()
    third = Quiet(config(tmp_path, block="10.99.0.0/24"))
    await third.start()
    assert str(third._plan.network) == "10.99.0.0/24"
    await third.close()


@pytest.mark.parametrize(("uplink", "asked"), [("nat", ["1.1.1.1"]), ("none", [])])
async def test_without_an_uplink_no_resolver_is_asked(tmp_path, uplink, asked):
    network = Network(config(tmp_path, uplink=uplink))
    assert [str(address) for address in network.workers._config.resolvers] == asked


async def test_wrong_settings_are_told_at_the_start(tmp_path):
    with pytest.raises(InvalidRequest, match="dns_servers"):
        Network(config(tmp_path, dns_servers=("resolver.example",)))
    with pytest.raises(InvalidRequest, match="network exception"):
        Network(config(tmp_path, exceptions=("10.0.0.5:443",)))
    clashing = Quiet(config(tmp_path, block="127.1.0.0/20"))
    with pytest.raises(InvalidRequest, match="network_block"):
        await clashing.start()
    with pytest.raises(Conflict) as caught:
        await Quiet(config(tmp_path, block="10.5.0.0/20", exceptions=("mirror.example=10.5.1.1:443",))).start()
    assert caught.value.code == "network_block_taken"
    assert "mirror.example" in caught.value.why


class TestPool:
    @pytest.fixture
    async def pooled(self, tmp_path):
        network = Quiet(config(tmp_path, pool=2))
        await network.start()
        yield network
        for sandbox_id in await network.leftovers():
            await network.release(sandbox_id)
        await network.close()
        await asyncio.to_thread(network.remove)
        assert os.listdir(tmp_path / "netns") == ["block"]

    @staticmethod
    async def full(network: Network) -> None:
        while network.pool.ready < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def test_slots_are_ready_before_they_are_asked_for(self, pooled):
        await self.full(pooled)
        await pooled.take(ID, policy())
        await pooled.take(OTHER, policy())
        assert pooled.pool.on_the_spot == 0
        await self.full(pooled)

    async def test_an_empty_pool_makes_one_on_the_spot(self, pooled):
        ids = [letter * 20 for letter in "abcdef"]
        await asyncio.gather(*(pooled.take(sandbox_id, policy()) for sandbox_id in ids))
        assert await pooled.leftovers() == ids
        assert pooled.pool.on_the_spot >= 2
        assert len({slot.plan.number for slot in pooled._slots.values()}) == len(ids)

    async def test_a_dead_maker_is_replaced(self, pooled):
        await self.full(pooled)
        os.kill(pooled.pool.maker_pid, signal.SIGKILL)
        await pooled.take(ID, policy())
        await pooled.take(OTHER, policy())
        await self.full(pooled)
        assert pooled.pool.restarts == 1

    async def test_a_slot_that_is_ready_lets_nothing_pass(self, pooled):
        await self.full(pooled)
        slot = pooled.pool._ready[0]
        tried = await asyncio.to_thread(
            subprocess.run,
            ["nsenter", f"--net={slot.folder}/guest", "python3", "-c", _TRY],
            capture_output=True,
            text=True,
        )
        assert tried.stdout.strip() == "ConnectionRefusedError"


_TRY = """
import socket
try:
    socket.create_connection(("93.184.215.14", 80), 3)
except OSError as error:
    print(type(error).__name__)
"""
