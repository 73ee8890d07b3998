"""One slot on the host: the bare namespace that gVisor takes over, and its router between that and the hub. A microVM
takes a tap of the router's instead of a namespace.

A slot is a folder `N/` with two names, `guest` and `router`, in the node's mount namespace. Addresses and MACs of the
guest's side are the same in every slot, so a guest never has to learn new ones; the namespace tells slots apart.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from cpuos.node import syscalls
from cpuos.node.network.namespaces import (
    in_fresh_thread,
    inside,
    keep_namespace,
    new_namespace,
    release_namespace,
    set_sysctls,
)
from cpuos.node.network.netlink import RouteNetlink
from cpuos.node.network.plan import GUEST_MAC, HUB_MAC, LAN, ROUTER_MAC, WAN, WAN_MAC, SlotPlan
from cpuos.node.network.tap import make_tap
from cpuos.node.network.told import remove_names_file
from cpuos.runtimes.base import GUEST_ADDRESS, ROUTER_ADDRESS

__all__ = ["ROUTING_SYSCTLS", "arm_slot", "guest_name", "make_slot", "open_socket", "release_slot", "router_name"]

_PREFIX = 30

ROUTING_SYSCTLS = {
    # A namespace starts with what the host has; these are set before any device is there.
    "net/ipv4/ip_forward": "0",
    **{
        f"net/ipv4/conf/{device}/{name}": value
        for device in ("all", "default")
        for name, value in {
            "accept_redirects": "0",
            "accept_source_route": "0",
            "arp_ignore": "1",
            "rp_filter": "0",
            "send_redirects": "0",
        }.items()
    },
    # Refusals are answered each, not six and then one a second: a program that hears nothing waits.
    "net/ipv4/icmp_ratemask": "0",
    "net/netfilter/nf_conntrack_acct": "1",
    "net/netfilter/nf_conntrack_timestamp": "1",
    # A connection whose entry was removed is refused, not taken up again in its middle.
    "net/netfilter/nf_conntrack_tcp_loose": "0",
    "net/netfilter/nf_conntrack_tcp_timeout_time_wait": "5",
    "net/netfilter/nf_conntrack_udp_timeout": "10",
}


def router_name(folder: Path) -> Path:
    return folder / "router"


def guest_name(folder: Path) -> Path:
    return folder / "guest"


def make_slot(
    folder: Path, plan: SlotPlan, *, hub: Path, load_rules: Callable[[SlotPlan], None], tap: bool = False
) -> None:
    """Make both namespaces, joined to each other and the hub, and armed. What an earlier try left is replaced.

    `load_rules` is called inside the router, before it forwards anything. With `tap` there is one namespace alone,
    under both names: the guest's side of the device is whoever opens it.
    """
    release_slot(folder)
    folder.mkdir(mode=0o700)
    in_fresh_thread(lambda: _make(folder, plan, hub=hub, load_rules=load_rules, tap=tap))


def arm_slot(folder: Path) -> None:
    """Give the bare namespace its address and route again: a sentry takes them away as it starts (network-facts 2)."""
    inside(guest_name(folder), _arm_here)


def open_socket(folder: Path) -> socket.socket:
    """An unconnected, non-blocking TCP socket made in the router, from which the guest is reached."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    return inside(router_name(folder), make)


def release_slot(folder: Path) -> None:
    """Remove both names. The links go with the namespaces, as soon as sentry and sockets are gone."""
    release_namespace(guest_name(folder))
    release_namespace(router_name(folder))
    remove_names_file(folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def _make(folder: Path, plan: SlotPlan, *, hub: Path, load_rules: Callable[[SlotPlan], None], tap: bool) -> None:
    with contextlib.ExitStack() as opened:
        hub_namespace = os.open(hub, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, hub_namespace)
        guest = new_namespace()
        opened.callback(os.close, guest)
        keep_namespace(guest_name(folder))
        if not tap:
            os.close(new_namespace())
        keep_namespace(router_name(folder))
        set_sysctls(ROUTING_SYSCTLS)
        with RouteNetlink() as router:
            router.set_up("lo")
            if tap:
                make_tap(LAN, mac=ROUTER_MAC)
            else:
                router.add_veth(LAN, mac=ROUTER_MAC, peer="eth0", peer_mac=GUEST_MAC, peer_netns=guest)
            router.set_address(LAN, f"{ROUTER_ADDRESS}/{_PREFIX}")
            router.add_veth(WAN, mac=WAN_MAC, peer=plan.hub_device, peer_mac=HUB_MAC, peer_netns=hub_namespace)
            router.set_address(WAN, f"{plan.address}/32")
            load_rules(plan)
            router.set_up(LAN)
            router.set_neighbour(LAN, GUEST_ADDRESS, mac=GUEST_MAC)
            router.set_up(WAN)
            router.set_neighbour(WAN, str(plan.hub_address), mac=HUB_MAC)
            router.set_route(WAN, f"{plan.hub_address}/32")
            router.set_route(WAN, "0.0.0.0/0", gateway=str(plan.hub_address), source=str(plan.address))
        set_sysctls({"net/ipv4/ip_forward": "1"})
        syscalls.setns(hub_namespace, syscalls.CLONE_NEWNET)
        with RouteNetlink() as hub_side:
            hub_side.set_up(plan.hub_device)
            hub_side.set_neighbour(plan.hub_device, str(plan.address), mac=WAN_MAC)
            hub_side.set_route(plan.hub_device, f"{plan.address}/32")
        if not tap:
            syscalls.setns(guest, syscalls.CLONE_NEWNET)
            _arm_here()


def _arm_here() -> None:
    with RouteNetlink() as guest:
        # Only a link that is up is taken over; the guest gets the loopback addresses of this `lo`.
        guest.set_up("lo")
        guest.set_address("eth0", f"{GUEST_ADDRESS}/{_PREFIX}")
        guest.set_up("eth0")
        guest.set_route("eth0", "0.0.0.0/0", gateway=ROUTER_ADDRESS)
