"""The hub: the namespace in which all slots of an instance meet, and the one way by which it reaches the host.

With NAT that is a link, and the hub's address on it stands for all slots (masquerade), so the host's routes know
nothing but one /30. With the uplink in user space it is a device that a process serves (ADR 0015), and the host has
nothing. Its rules hold a second time what each router holds: a sandbox that got past its own router still reaches no
other sandbox, no blocked range and nothing of the host.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from cpuos.errors import PlatformError, SetupRequired
from cpuos.node.network.conntrack import ConntrackSocket, Flow, flow_key
from cpuos.node.network.namespaces import (
    in_fresh_thread,
    inside,
    keep_namespace,
    new_namespace,
    release_namespace,
    set_sysctls,
)
from cpuos.node.network.netlink import RouteNetlink
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.plan import SLOT_PREFIX, UPLINK, BlockPlan, SlotPlan, UplinkKind, host_link, host_table
from cpuos.node.network.slot import ROUTING_SYSCTLS
from cpuos.node.network.tap import open_tun
from cpuos.node.network.uplink.packets import ACCEPTED, REFUSED
from cpuos.types.blocked import ALWAYS_BLOCKED, BLOCKED_PORTS, Exemption

__all__ = ["Hub", "UserUplinkRules", "host_rules", "hub_rules", "remove_host_network"]

_HOST_MAC, _UPLINK_MAC = "02:00:0a:00:00:05", "02:00:0a:00:00:06"
_HUB_TABLE = "hub"
_ACCEPTING_PORT, _REFUSING_PORT = 4000, 4001
"""Of the hub itself, with the uplink in user space: where its process listens, and where nobody does."""
_BACKLOG = 4096
_DATAGRAMS_PER_S, _DATAGRAMS_BURST, _DEVICE_PACKETS = 5_000, 500, 2_000
"""Each datagram of a slot costs the process that serves all some 20 us; bursts of several slots fit into the device."""
_DEVICE_BYTES = 65535
"""So that an answer of any size goes in at once; the links to the slots make fragments of it."""
_BRIEF = f"""
  ct timeout brief_tcp {{
    protocol tcp
    l3proto ip
    policy = {{ time_wait: {ROUTING_SYSCTLS["net/netfilter/nf_conntrack_tcp_timeout_time_wait"]} }}
  }}
  ct timeout brief_udp {{
    protocol udp
    l3proto ip
    policy = {{ unreplied: {ROUTING_SYSCTLS["net/netfilter/nf_conntrack_udp_timeout"]} }}
  }}"""
"""As in the hub, for what comes from it."""


class Hub:
    """Made by the first daemon and found again by the next: it lives on while sandboxes do."""

    def __init__(
        self, folder: Path, *, instance_id: str, uplink: UplinkKind, exemptions: Sequence[Exemption] = ()
    ) -> None:
        self._folder = folder
        self._instance_id = instance_id
        self._uplink = uplink
        self._exemptions = tuple(exemptions)
        self._host_addresses: tuple[IPv4Address, ...] = ()

    @property
    def path(self) -> Path:
        """The hub's namespace."""
        return self._folder / "hub"

    def kept_block(self) -> IPv4Network | None:
        """The block of a hub that an earlier daemon made and that is still there."""
        if not _is_namespace(self.path):
            return None
        try:
            return IPv4Network((self._folder / "block").read_text().strip())
        except (OSError, ValueError):
            return None

    def open(self, plan: BlockPlan) -> None:
        """Make it, or mend the one that is there: nothing of what passes it now is cut. Blocks; may be repeated."""
        if self.kept_block() != plan.network:
            self.remove()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / "block").write_text(f"{plan.network}\n")
            in_fresh_thread(self._make)
        self._load_rules(plan)
        if self._uplink == "nat":
            self._join_host(plan)
        else:
            remove_host_network(self._instance_id)
            inside(self.path, _delete_uplink)
        inside(self.path, lambda: set_sysctls({"net/ipv4/ip_forward": "1"}))

    def open_user_uplink(self, plan: BlockPlan) -> tuple[int, socket.socket]:
        """The device by which packets leave, which goes with its last descriptor, and the socket to which connections
        come back. Blocks."""
        return inside(self.path, lambda: _make_user_uplink(plan))

    def set_host_addresses(self, plan: BlockPlan, addresses: Sequence[IPv4Address]) -> None:
        """With the uplink in user space the host's own addresses are refused here too: no table of the host does it."""
        if self._uplink == "user" and tuple(addresses) != self._host_addresses:
            self._host_addresses = tuple(addresses)
            self._load_rules(plan)

    def received_bytes(self) -> dict[str, int]:
        """By device: what came into the hub. Blocks."""

        def read() -> dict[str, int]:
            with RouteNetlink() as hub:
                return hub.received_bytes()

        return inside(self.path, read)

    def remove(self) -> None:
        """Take it away with the host's link and table. Nothing there is fine."""
        remove_host_network(self._instance_id)
        release_namespace(self.path)

    def end_flows(self, plan: SlotPlan, flows: Iterable[Flow] | None = None) -> int:
        """Forget the slot's connections, or those of them that its router cut: here, and in the host's table. So their
        ends are told now, with bytes, and what a sandbox left open fills no table for days."""
        wanted = None if flows is None else {_from_hub(flow) for flow in flows}

        def end() -> list[Flow]:
            with ConntrackSocket() as table:
                found = [flow for flow in table.flows(source=plan.address) if wanted is None or _own(flow) in wanted]
                return [flow for flow in found if table.delete(flow)]

        if wanted is not None and not wanted:
            return 0
        ended = inside(self.path, end)
        if self._uplink == "nat":
            with ConntrackSocket() as host:
                for flow in ended:
                    _end_on_host(host, flow, hub_address=plan.hub_address)
        return len(ended)

    def _load_rules(self, plan: BlockPlan) -> None:
        user_uplink = UserUplinkRules(plan=plan, host_addresses=self._host_addresses)
        rules = hub_rules(exemptions=self._exemptions, user_uplink=user_uplink if self._uplink == "user" else None)
        inside(self.path, lambda: _load(rules))

    def _make(self) -> None:
        os.close(new_namespace())
        keep_namespace(self.path)
        set_sysctls(ROUTING_SYSCTLS)
        with RouteNetlink() as hub:
            hub.set_up("lo")

    def _join_host(self, plan: BlockPlan) -> None:
        """The table before the link: there is no moment in which the link may do more than it should."""
        try:
            _load(host_rules(self._instance_id, plan))
        except PlatformError:  # a kernel without time-outs of their own: entries stay as long as all of the host's
            _load(host_rules(self._instance_id, plan, with_timeouts=False))
        link = host_link(self._instance_id)
        with RouteNetlink() as host:
            if not self._is_joined(host, plan):
                host.delete_link(link)
                inside(self.path, _delete_uplink)  # of a process in user space that ended a moment ago
                hub_namespace = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    host.add_veth(link, mac=_HOST_MAC, peer=UPLINK, peer_mac=_UPLINK_MAC, peer_netns=hub_namespace)
                finally:
                    os.close(hub_namespace)
            set_sysctls({f"net/ipv6/conf/{link}/disable_ipv6": "1"})
            host.set_address(link, f"{plan.host_address}/30")
            host.set_up(link)
            host.set_neighbour(link, str(plan.hub_address), mac=_UPLINK_MAC)
        inside(self.path, lambda: _raise_uplink(plan))
        set_sysctls({"net/ipv4/ip_forward": "1"})

    def _is_joined(self, host: RouteNetlink, plan: BlockPlan) -> bool:
        """Whether the host's link is there and leads into this very hub."""
        devices = {device for device, address in host.addresses() if address.ip == plan.host_address}
        return host_link(self._instance_id) in devices and inside(self.path, lambda: _has_device(UPLINK))


def remove_host_network(instance_id: str) -> list[str]:
    """Take from the host what an instance added to it: its link, with the route, and its table. Says what it was."""
    removed = []
    link, table = host_link(instance_id), host_table(instance_id)
    if _has_device(link):
        with RouteNetlink() as host:
            host.delete_link(link)
        removed.append(f"link {link}")
    with contextlib.suppress(SetupRequired):  # without the library no table was ever made
        if _has_table(table):
            _load(f"delete table ip {table}\n")
            removed.append(f"nft table ip {table}")
    return removed


@dataclass(frozen=True, kw_only=True)
class UserUplinkRules:
    plan: BlockPlan
    host_addresses: tuple[IPv4Address, ...] = ()

    def chains(self) -> str:
        """A SYN goes out untracked, so that the one which comes back begins the connection: to the hub itself."""
        ports = f"{{ {_ACCEPTING_PORT}, {_REFUSING_PORT} }}"
        address = self.plan.hub_address
        return f"""
  set paced {{ type ipv4_addr; size 65535; flags dynamic, timeout; timeout 1m; }}
  chain untracked {{
    type filter hook prerouting priority raw;
    iifname "{SLOT_PREFIX}*" tcp flags & (fin | syn | rst | ack) == syn notrack
  }}
  chain returned {{
    type nat hook prerouting priority dstnat;
    iifname "{UPLINK}" meta l4proto tcp ip dscp {ACCEPTED} dnat to {address}:{_ACCEPTING_PORT}
    iifname "{UPLINK}" meta l4proto tcp ip dscp {REFUSED} dnat to {address}:{_REFUSING_PORT}
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    ct status dnat tcp dport {ports} accept
  }}
  chain output {{
    type filter hook output priority filter; policy drop;
    meta l4proto icmp accept
    ct status dnat tcp sport {ports} accept
  }}"""

    def limits(self) -> str:
        """Before all else, so that a flood is its slot's own affair."""
        rate = f"limit rate over {_DATAGRAMS_PER_S}/second burst {_DATAGRAMS_BURST} packets"
        slots = f'iifname "{SLOT_PREFIX}*" oifname "{UPLINK}" meta l4proto {{ udp, icmp }}'
        return f"{slots} update @paced {{ ip saddr {rate} }} counter drop"

    def refusals(self) -> str:
        """After what is exempt, which the uplink's process does not dial either if it is the host's own."""
        if not self.host_addresses:
            return ""
        return f'iifname "{SLOT_PREFIX}*" ip daddr {{ {", ".join(map(str, self.host_addresses))} }} counter drop'


_LINK_CHAINS = f"""
  chain input {{
    type filter hook input priority filter; policy drop;
  }}
  chain output {{
    type filter hook output priority filter; policy drop;
    meta l4proto icmp accept
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat;
    oifname "{UPLINK}" masquerade
  }}"""


def hub_rules(*, exemptions: Sequence[Exemption] = (), user_uplink: UserUplinkRules | None = None) -> str:
    """One transaction that puts the hub's table in place of an earlier one."""
    slots = f'iifname "{SLOT_PREFIX}*"'
    limits, refusals = (user_uplink.limits(), user_uplink.refusals()) if user_uplink is not None else ("", "")
    chains = user_uplink.chains() if user_uplink is not None else _LINK_CHAINS
    return f"""
table ip {_HUB_TABLE} {{}}
delete table ip {_HUB_TABLE}
table ip {_HUB_TABLE} {{
  set blocked {{ type ipv4_addr; flags interval; elements = {{ {_blocked_networks()} }} }}
  set exempt {{ type ipv4_addr . inet_proto . inet_service; {_exempt_elements(exemptions)} }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    {slots} fib saddr . iif oif missing counter drop
    {limits}
    ct state invalid counter drop
    ct state established,related accept
    {slots} oifname != "{UPLINK}" counter drop
    {slots} ip daddr . meta l4proto . th dport @exempt accept
    {refusals}
    {slots} ip daddr @blocked counter drop
    {slots} tcp dport {{ {", ".join(map(str, sorted(BLOCKED_PORTS)))} }} counter drop
    {slots} meta l4proto {{ tcp, udp }} accept
    {slots} icmp type echo-request accept
    counter
  }}{chains}
}}
"""


def host_rules(instance_id: str, plan: BlockPlan, *, with_timeouts: bool = True) -> str:
    """One transaction that puts the host's table in place of an earlier one.

    `with_timeouts`: what has ended is forgotten when the hub forgets it. An entry that outlived that of the hub would
    belong to no sandbox any more, and none would take it away with it."""
    link, table = host_link(instance_id), host_table(instance_id)
    brief = _BRIEF if with_timeouts else ""
    begun = f'iifname "{link}" ct state new ct timeout set ' if with_timeouts else ""
    set_brief = f'{begun}"brief_tcp"\n    {begun}"brief_udp"' if with_timeouts else ""
    return f"""
table ip {table} {{}}
delete table ip {table}
table ip {table} {{{brief}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname "{link}" ct state established,related accept
    iifname "{link}" counter drop
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname "{link}" ip saddr != {plan.hub_address} counter drop
    iifname "{link}" oifname "{link}" counter drop
    {set_brief}
    iifname "{link}" tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    oifname "{link}" ct state established,related accept
    oifname "{link}" counter drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat;
    ip saddr {plan.hub_address} oifname != "{link}" masquerade
  }}
}}
"""


def _blocked_networks() -> str:
    return ", ".join(str(blocked.network) for blocked in ALWAYS_BLOCKED)


def _exempt_elements(exemptions: Sequence[Exemption]) -> str:
    keys = sorted({f"{rule.address} . {rule.protocol} . {rule.port}" for rule in exemptions})
    return f"elements = {{ {', '.join(keys)} }}" if keys else ""


def _own(flow: Flow) -> tuple[int | None, str, IPv4Address, int | None]:
    return flow.source_port, flow.protocol, flow.address, flow.port


def _from_hub(flow: Flow) -> tuple[int | None, str, IPv4Address, int | None]:
    """`_own` of a router's connection as the hub has it."""
    return flow.mapped_port, flow.protocol, flow.address, flow.port


def _end_on_host(host: ConntrackSocket, flow: Flow, *, hub_address: IPv4Address) -> None:
    if flow.protocol in ("tcp", "udp") and flow.mapped_port is not None and flow.port is not None:
        host.delete_key(flow_key(flow.protocol, hub_address, flow.mapped_port, address=flow.address, port=flow.port))


def _raise_uplink(plan: BlockPlan) -> None:
    with RouteNetlink() as hub:
        hub.set_address(UPLINK, f"{plan.hub_address}/30")
        hub.set_up(UPLINK)
        hub.set_neighbour(UPLINK, str(plan.host_address), mac=_HOST_MAC)
        hub.set_route(UPLINK, "0.0.0.0/0", gateway=str(plan.host_address))


def _delete_uplink() -> None:
    with RouteNetlink() as hub:
        hub.delete_link(UPLINK)


def _make_user_uplink(plan: BlockPlan) -> tuple[int, socket.socket]:
    with contextlib.ExitStack() as opened:
        _delete_uplink()  # of a daemon that ended a moment ago
        device = open_tun(UPLINK)
        opened.callback(os.close, device)
        with RouteNetlink() as hub:
            hub.set_size(UPLINK, packet_bytes=_DEVICE_BYTES, queue_packets=_DEVICE_PACKETS)
            hub.set_address(UPLINK, f"{plan.hub_address}/30")
            hub.set_up(UPLINK)
            hub.set_route(UPLINK, "0.0.0.0/0")
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        listener = opened.enter_context(socket.socket(socket.AF_INET, kind))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(plan.hub_address), _ACCEPTING_PORT))
        listener.listen(_BACKLOG)
        opened.pop_all()
    return device, listener


def _load(rules: str) -> None:
    """In the namespace of the calling thread."""
    with _rules_context() as context:
        context.run(rules)


def _has_table(name: str) -> bool:
    with _rules_context() as context:
        return any(entry.get("table", {}).get("name") == name for entry in context.query("list tables ip"))


@contextlib.contextmanager
def _rules_context() -> Iterator[NftContext]:
    context = NftContext()
    try:
        yield context
    finally:
        context.close()


def _has_device(name: str) -> bool:
    return name in {device for _, device in socket.if_nameindex()}


def _is_namespace(path: Path) -> bool:
    try:
        return os.stat(path).st_dev == os.stat("/proc/self/ns/net").st_dev
    except OSError:
        return False
