"""Slots on this host: two namespaces, one link, nothing in the host's own namespace."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from cpuos.errors import NotFound
from cpuos.node import syscalls
from cpuos.node.network import NetworkSlots
from cpuos.node.network.namespaces import in_fresh_thread

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
ID, OTHER = "a" * 20, "b" * 20


def inside(path: Path, work):
    def run():
        fd = os.open(path, os.O_RDONLY)
        try:
            syscalls.setns(fd, syscalls.CLONE_NEWNET)
        finally:
            os.close(fd)
        return work()

    return in_fresh_thread(run)


def mountinfo() -> str:
    return Path("/proc/self/mountinfo").read_text()


@pytest.fixture
async def slots(tmp_path):
    host_links = socket.if_nameindex()
    slots = NetworkSlots(tmp_path / "netns")
    yield slots
    for sandbox_id in await slots.leftovers():
        await slots.release(sandbox_id)
    assert socket.if_nameindex() == host_links
    assert os.listdir(tmp_path / "netns") == []


async def test_slot_joins_router_and_guest(slots):
    path = await slots.take(ID)
    assert path == slots.path(ID)
    assert {name for _, name in inside(path, socket.if_nameindex)} == {"lo", "eth0"}

    def listen():
        server = socket.socket()
        server.bind(("10.0.0.2", 1))
        server.listen()
        return server

    with inside(path, listen) as server:
        link = await slots.guest_link(ID)
        with link.socket:
            assert link.socket.getblocking() is False
            await asyncio.get_running_loop().sock_connect(link.socket, link.address)
            connection, peer = server.accept()
            connection.close()
            assert peer[0] == "10.0.0.1"


async def test_guest_namespace_has_no_way_out(slots):
    path = await slots.take(ID)

    def routes():
        return Path("/proc/thread-self/net/route").read_text().splitlines()[1:]

    assert [line.split()[1] for line in inside(path, routes)] == ["0000000A"], "only 10.0.0.0/30"
    addresses = inside(path, lambda: Path("/proc/thread-self/net/if_inet6").read_text())
    assert [line.split()[-1] for line in addresses.splitlines()] == ["lo"], "IPv6 only on loopback"


async def test_slots_are_apart_and_have_equal_addresses(slots):
    await asyncio.gather(slots.take(ID), slots.take(OTHER))
    assert await slots.leftovers() == [ID, OTHER]
    for sandbox_id in (ID, OTHER):
        mac = inside(slots.path(sandbox_id), lambda: Path("/proc/thread-self/net/arp").read_text())
        assert "10.0.0.2" not in mac
    await slots.release(ID)
    assert await slots.leftovers() == [OTHER]
    with pytest.raises(NotFound):
        await slots.guest_link(ID)


async def test_verbs_may_be_repeated_and_bear_nothing_there(slots, tmp_path):
    await slots.release(ID)
    await slots.take(ID)
    await slots.take(ID)
    await slots.arm(ID)
    await slots.arm(ID)
    await slots.release(ID)
    await slots.release(ID)
    (tmp_path / "netns" / f"{OTHER}.router").touch()  # a take that was killed between two steps
    assert await slots.leftovers() == [OTHER]
    await slots.take(OTHER)
    assert mountinfo().count(f"{OTHER}.router") == 1
