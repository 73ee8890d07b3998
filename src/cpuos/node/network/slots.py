"""A slot: the bare namespace that gVisor takes over, and the router namespace from which the guest is reached.

    router: lan 10.0.0.1/30 ── veth ── eth0 10.0.0.2/30 :bare

Addresses and MACs are the same in every slot, so a guest never has to learn new ones; the namespace tells slots apart.
The router has no uplink and forwards nothing, and nothing listens in it: the guest reaches nobody. There is no default
route in the guest either, so a program that tries to leave is told at once ("Network is unreachable").
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path

from cpuos.errors import NotFound, PlatformError
from cpuos.node import syscalls
from cpuos.node.network.namespaces import in_fresh_thread, keep_namespace, new_namespace, release_namespace
from cpuos.node.network.netlink import RouteNetlink
from cpuos.runtimes.base import AGENT_PORT, GUEST_ADDRESS, ROUTER_ADDRESS, GuestLink

__all__ = ["NetworkSlots"]

_ROUTER_MAC, _GUEST_MAC = "02:00:0a:00:00:01", "02:00:0a:00:00:02"
_PREFIX = 30
_NAME = re.compile(r"([a-z0-9]+)\.(guest|router)")


class NetworkSlots:
    """Makes and removes slots; their names lie in one folder, in the node's mount namespace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, sandbox_id: str) -> Path:
        """The bare namespace, for the runtime."""
        return self._folder / f"{sandbox_id}.guest"

    async def take(self, sandbox_id: str) -> Path:
        """Make both namespaces, joined and armed. What an earlier try left is replaced."""
        try:
            await asyncio.to_thread(in_fresh_thread, lambda: self._make(sandbox_id))
        except OSError as problem:
            await self.release(sandbox_id)
            raise PlatformError(f"cannot make the network slot of sandbox {sandbox_id}", str(problem)) from problem
        return self.path(sandbox_id)

    async def arm(self, sandbox_id: str) -> None:
        """Give the bare namespace its address again: a sentry takes it away as it starts (network-facts 2)."""
        try:
            await asyncio.to_thread(in_fresh_thread, lambda: self._arm(sandbox_id))
        except OSError as problem:
            raise PlatformError(f"cannot arm the network slot of sandbox {sandbox_id}", str(problem)) from problem

    async def guest_link(self, sandbox_id: str) -> GuestLink:
        """An unconnected, non-blocking TCP socket made in the router namespace."""
        try:
            made = await asyncio.to_thread(in_fresh_thread, lambda: self._socket(sandbox_id))
        except OSError as problem:
            raise NotFound(
                f"cannot reach sandbox {sandbox_id}", f"it has no network slot: {problem}", code="sandbox_not_found"
            ) from problem
        return GuestLink(socket=made, address=(GUEST_ADDRESS, AGENT_PORT))

    async def release(self, sandbox_id: str) -> None:
        """Remove both names. The links go with the namespaces, as soon as sentry and sockets are gone."""
        await asyncio.to_thread(self._release, sandbox_id)

    async def leftovers(self) -> list[str]:
        """Ids of all slots, whole or half-made."""
        names = await asyncio.to_thread(os.listdir, self._folder)
        return sorted({match[1] for name in names if (match := _NAME.fullmatch(name))})

    def _router_path(self, sandbox_id: str) -> Path:
        return self._folder / f"{sandbox_id}.router"

    def _make(self, sandbox_id: str) -> None:
        self._release(sandbox_id)
        guest = new_namespace()
        try:
            keep_namespace(self.path(sandbox_id))
            os.close(new_namespace())
            keep_namespace(self._router_path(sandbox_id))
            with RouteNetlink() as router:
                router.add_veth("lan", mac=_ROUTER_MAC, peer="eth0", peer_mac=_GUEST_MAC, peer_netns=guest)
                router.set_address("lan", f"{ROUTER_ADDRESS}/{_PREFIX}")
                router.set_up("lan")
                router.set_neighbour("lan", GUEST_ADDRESS, mac=_GUEST_MAC)
            syscalls.setns(guest, syscalls.CLONE_NEWNET)
            _arm_here()
        finally:
            os.close(guest)

    def _arm(self, sandbox_id: str) -> None:
        _enter(self.path(sandbox_id))
        _arm_here()

    def _socket(self, sandbox_id: str) -> socket.socket:
        _enter(self._router_path(sandbox_id))
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _release(self, sandbox_id: str) -> None:
        release_namespace(self.path(sandbox_id))
        release_namespace(self._router_path(sandbox_id))


def _arm_here() -> None:
    with RouteNetlink() as guest:
        # Only a link that is up is taken over; the guest gets the loopback addresses of this `lo`.
        guest.set_up("lo")
        guest.set_address("eth0", f"{GUEST_ADDRESS}/{_PREFIX}")
        guest.set_up("eth0")


def _enter(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        syscalls.setns(fd, syscalls.CLONE_NEWNET)
    finally:
        os.close(fd)
