"""The nft rules of a router that hold under every policy. Pure: text in, text out.

    frame ── netdev guest ── prerouting: judge ── forward ──── admitted ── accepted      (a connection of its own)
             forged, paced   policy's layers      └ input ──── admitted ── the peek      (a name will be read)
                                                  └ refused / limited ── answer          (said at once)

Multicast and broadcast end at the device: no answer is ever sent to such, and routing would drop them unseen.
`judge` puts its word into the packet's mark; the policy's part of it lies in the chain `layers`, which
`policy_rules` rewrites. Until then the word is no: a router that was never given a policy lets nothing through.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from string import Template

from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.plan import GUEST_MAC, LAN, ROUTER_MAC, WAN, SlotPlan
from cpuos.node.network.surroundings import Surroundings
from cpuos.runtimes.base import GUEST_ADDRESS, ROUTER_ADDRESS
from cpuos.types.blocked import ALWAYS_BLOCKED, BLOCKED_PORTS, Exemption

__all__ = [
    "DIRECT",
    "GUEST_FLOW",
    "LOG_GROUP",
    "MAX_LAYERS",
    "NODE_FLOW",
    "PEEKED",
    "PEEK_FLOW",
    "PEEK_PORT",
    "PEEK_SOCKET_MARK",
    "TABLE",
    "base_rules",
    "base_stamp",
    "host_rules",
    "verdict_rules",
]

TABLE = "cpuos"
LOG_GROUP = 5
PEEK_PORT = 8443
MAX_LAYERS = 4
"""As many as an `EffectivePolicy` may have."""

DIRECT, PEEKED = 1, 2
"""The judge's word in a packet's mark; none: refused."""
GUEST_FLOW, NODE_FLOW, PEEK_FLOW = 1, 2, 3
"""Marks of connections: who opened it."""
PEEK_SOCKET_MARK = 0x7065
"""SO_MARK of the sockets with which the peek dials: they reach only `wan`, and all others only `lan`. Setting a mark
takes a capability that the peek does not have."""

_HOPS = 64
"""Set on all that the guest sends: an end that only the router sees would leave the connection open in the tables of
hub and host, for days and uncounted."""
_MAX_BURST_MEGABYTES = 1000  # the kernel counts bytes in 32 bits

_BASE = Template("""\
table netdev $table
delete table netdev $table
table ip $table
delete table ip $table
table netdev $table {
  counter forged { }
  counter paced { }
  counter names_paced { }
  counter refused { }
  chain unanswerable {
    counter name "refused"
    limit rate 20/second burst 50 packets log group $log_group snaplen 128 queue-threshold 1 prefix "d 0"
    drop
  }
  chain guest {
    type filter hook ingress device "$lan" priority -500; policy drop;
    ether saddr != $guest_mac counter name "forged" drop
    ether type arp ether daddr { $router_mac, ff:ff:ff:ff:ff:ff } arp saddr ether $guest_mac arp saddr ip $guest \
arp daddr ip $router arp operation { request, reply } limit rate 50/second accept
    ip daddr $router udp dport 53 limit rate over $names_per_s/second burst $names_burst packets \
counter name "names_paced" drop
    ip protocol icmp limit rate over $pings_per_s/second burst $pings_per_s packets counter name "paced" drop
    limit rate over $packets_per_s/second burst $packets_per_s packets counter name "paced" drop
    limit rate over $megabytes_per_s mbytes/second burst $megabytes_burst mbytes counter name "paced" drop
    ether type ip ip version 4 ip hdrlength 5 ip saddr $guest ip daddr 224.0.0.0/3 goto unanswerable
    ether type ip ether daddr $router_mac ip version 4 ip hdrlength 5 ip saddr $guest accept
    counter name "forged" drop
  }
}
table ip $table {
  counter paced { }
  counter allowed { }
  counter peeked { }
  counter refused { }
  counter limited { }
  counter stray { }
  counter dialled { }
  counter undialled { }
  set blocked { type ipv4_addr; flags interval; elements = { $blocked } }
  set host { type ipv4_addr; $host }
  set outside { type ipv4_addr; flags interval; $outside }
  set exempt { type ipv4_addr . inet_proto . inet_service; $exempt }

  chain $stamp { }
$layer_chains
  chain layers { }
  chain open { }
  chain judge {
    meta mark set 0
    meta l4proto != { tcp, udp, icmp } return
    meta l4proto icmp icmp type != echo-request return
    ip daddr != @outside return
    ip daddr . meta l4proto . th dport @exempt goto layers
    ip daddr @host return
    ip daddr @blocked return
    tcp dport { $blocked_ports } return
    goto layers
  }
  chain answer {
    meta l4proto tcp reject with tcp reset
    meta l4proto udp reject with icmp type port-unreachable
    reject with icmp type admin-prohibited
  }
  chain accepted { }
  chain refused { }
  chain limited { }
  chain stray {
    counter name "stray"
    meta l4proto tcp reject with tcp reset
    drop
  }
  chain admitted {
    meta l4proto tcp tcp flags & (fin | syn | rst | ack) != syn goto refused
    limit rate over $new_connections_per_s/second burst $new_connections_burst packets goto limited
    ct count over $concurrent_connections goto limited
    ct mark set $guest_flow
    meta mark $peeked counter name "peeked" accept
    goto accepted
  }

  chain incoming {
    type filter hook prerouting priority mangle; policy accept;
    iifname "$wan" limit rate over $megabytes_per_s mbytes/second burst $megabytes_burst mbytes \
counter name "paced" drop
    iifname "$lan" ip ttl set $hops
    iifname "$lan" ct state new ct mark 0 jump judge
  }
  chain steer {
    type nat hook prerouting priority dstnat; policy accept;
    iifname "$lan" meta mark $peeked meta l4proto tcp redirect to :$peek_port
  }
  chain forward {
    type filter hook forward priority filter; policy drop;
    iifname "$wan" oifname "$lan" ct state established,related accept
    iifname != "$lan" drop
    ct state invalid goto stray
    ct state established accept
    ct state related icmp type destination-unreachable accept
    ct state related goto stray
    oifname != "$wan" goto refused
    ct mark $guest_flow accept
    meta mark $direct goto admitted
    goto refused
  }
  chain input {
    type filter hook input priority filter; policy drop;
    ct state established accept
    iifname "$wan" ct state related accept
    iifname "lo" accept
    iifname != "$lan" drop
    ct state invalid,related goto stray
    ip daddr $router udp dport 53 accept
    ip daddr $router tcp dport 53 goto names_by_tcp
    tcp dport $peek_port ct status dnat ct mark $guest_flow accept
    tcp dport $peek_port ct status dnat meta mark $peeked goto admitted
    goto refused
  }
  chain names_by_tcp {
    tcp flags & (fin | syn | rst | ack) != syn goto refused
    limit rate over $names_per_s/second burst $names_burst packets goto limited
    ct count over 32 goto limited
    accept
  }
  chain output {
    type filter hook output priority filter; policy drop;
    oifname "lo" accept
    ct state established,related accept
    oifname "$lan" ct state invalid accept
    oifname "$lan" ct state new meta mark != $peek_socket ct mark set $node_flow accept
    oifname "$wan" ct state new ct mark $peek_flow accept
    oifname "$wan" ct state new meta l4proto tcp meta mark $peek_socket goto dial
    counter name "undialled"
    goto answer
  }
  chain dial {
    jump judge
    meta mark { $direct, $peeked } ct mark set $peek_flow counter name "dialled" accept
    counter name "undialled"
    goto answer
  }
  chain leaving {
    type nat hook postrouting priority srcnat; policy accept;
    oifname "$wan" ip saddr $guest snat to $address
  }
}
""")


def base_rules(
    plan: SlotPlan,
    *,
    limits: NetworkLimits | None = None,
    exemptions: Iterable[Exemption] = (),
    surroundings: Surroundings = Surroundings(),
) -> str:
    """One transaction that puts the router's tables in place of earlier ones. The device `lan` must be there."""
    limits = limits or NetworkLimits()
    exempt = sorted({f"{rule.address} . {rule.protocol} . {rule.port}" for rule in exemptions})
    values = dict(
        vars(limits),
        megabytes_burst=min(limits.megabytes_per_s, _MAX_BURST_MEGABYTES),
        table=TABLE,
        log_group=LOG_GROUP,
        hops=_HOPS,
        lan=LAN,
        wan=WAN,
        guest=GUEST_ADDRESS,
        guest_mac=GUEST_MAC,
        router=ROUTER_ADDRESS,
        router_mac=ROUTER_MAC,
        address=plan.address,
        blocked=", ".join(str(blocked.network) for blocked in ALWAYS_BLOCKED),
        blocked_ports=", ".join(str(port) for port in BLOCKED_PORTS),
        exempt=_elements(exempt),
        layer_chains="\n".join(f"  chain layer_{number} {{ }}" for number in range(MAX_LAYERS)),
        direct=DIRECT,
        peeked=PEEKED,
        peek_port=PEEK_PORT,
        guest_flow=GUEST_FLOW,
        node_flow=NODE_FLOW,
        peek_flow=PEEK_FLOW,
        peek_socket=PEEK_SOCKET_MARK,
    )
    plain = _BASE.substitute(values, host="", outside="", stamp="base_0")
    stamp = f"base_{hashlib.sha256(plain.encode()).hexdigest()[:16]}"
    host, outside = _elements(map(str, surroundings.addresses)), _elements(map(str, surroundings.reach))
    return _BASE.substitute(values, host=host, outside=outside, stamp=stamp) + verdict_rules(0)


def base_stamp(base: str) -> str:
    """The name of a chain that only these base rules have, whatever the host's surroundings: a router that has it, has
    them."""
    match = re.search(r"chain (base_[0-9a-f]{16}) ", base)
    if match is None:
        raise ValueError("these are no base rules")
    return match[1]


def host_rules(surroundings: Surroundings) -> str:
    """One transaction that makes these the host's own addresses, and what it has a way to."""
    script = ""
    for name, elements in (("host", surroundings.addresses), ("outside", surroundings.reach)):
        script += f"flush set ip {TABLE} {name}\n"
        if elements:
            script += f"add element ip {TABLE} {name} {{ {', '.join(map(str, elements))} }}\n"
    return script


def verdict_rules(version: int) -> str:
    """What is counted and logged at each end. The log says by which version of the policy it was judged: "a 7"
    accepted, "d 7" refused, "d 7 limit" allowed but over a cap. Counters hold what the limited log leaves out."""
    log = f"log group {LOG_GROUP} snaplen 128 queue-threshold 1 prefix"
    some = "limit rate 20/second burst 50 packets"
    return f"""\
flush chain ip {TABLE} accepted
flush chain ip {TABLE} refused
flush chain ip {TABLE} limited
add rule ip {TABLE} accepted counter name "allowed" {log} "a {version}" accept
add rule ip {TABLE} refused counter name "refused"
add rule ip {TABLE} refused {some} {log} "d {version}"
add rule ip {TABLE} refused goto answer
add rule ip {TABLE} limited counter name "limited"
add rule ip {TABLE} limited {some} {log} "d {version} limit"
add rule ip {TABLE} limited goto answer
"""


def _elements(texts: Iterable[str]) -> str:
    joined = ", ".join(texts)
    return f"elements = {{ {joined} }}" if joined else ""
