"""The part of `cpuos doctor` that looks at what sandboxes' network needs of the host."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpuos.errors import CpuosError
from cpuos.setup.checks import SETUP, Check, missing, ok, warn
from cpuos.setup.host import Host

__all__ = ["look_at_network"]

_LIBRARY = "libnftables.so.1"
_TUN = "/dev/net/tun"


def look_at_network(host: Host) -> Iterator[Check]:
    """Of the namespace of the calling thread."""
    yield _look_at_library()
    yield _look_at_block(host)
    yield _look_at_exceptions(host)
    if host.settings.network_uplink == "none":
        yield ok("network uplink", "none is wanted: sandboxes reach nothing outside")
        return
    if host.settings.network_uplink == "user":
        yield _look_at_user_uplink()
        return
    yield _look_at_forwarding()
    yield _look_at_forward_chains(host)


def _look_at_library() -> Check:
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return missing("network rules", f"{_LIBRARY} cannot be loaded: {error}", fix=SETUP)
    return ok("network rules", f"{_LIBRARY} is there")


def _look_at_block(host: Host) -> Check:
    from cpuos.node.network.block import choose_block, read_routes, taken_addresses
    from cpuos.node.network.netlink import RouteNetlink
    from cpuos.node.network.plan import host_link
    from cpuos.types.exceptions import parse_exceptions

    settings = host.settings
    link = host_link(settings.instance_id)
    with RouteNetlink() as here:
        in_use = [str(address) for device, address in here.addresses() if device == link]
    try:
        exemptions = parse_exceptions(settings.network_exceptions)
    except CpuosError:
        exemptions = ()  # told apart
    try:
        taken = taken_addresses(read_routes(), own_link=link, exemptions=exemptions)
        block = choose_block(settings.network_block, taken=taken, slots=settings.max_sandboxes + settings.network_pool)
    except CpuosError as error:
        return missing("network block", f"{error.what}: {error.lines()[1]}", fix=error.lines()[2])
    if in_use:
        return ok("network block", f"{link} has {', '.join(in_use)}")
    return ok("network block", f"{block} meets nothing that this host uses")


def _look_at_exceptions(host: Host) -> Check:
    from cpuos.types.exceptions import parse_exceptions

    texts = host.settings.network_exceptions
    try:
        parse_exceptions(texts)
    except CpuosError as error:
        return missing("network exceptions", f"{error.what}: {error.why}", fix=error.hint)
    return ok("network exceptions", ", ".join(texts) or "none: no private address is reachable from any sandbox")


def _look_at_user_uplink() -> Check:
    name = "network uplink"
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        return warn(name, f"only root can open {_TUN}", fix="sudo cpuos doctor")
    except OSError as error:
        return missing(name, f"in user space, which needs {_TUN}: {error.strerror}", fix="sudo modprobe tun")
    lowest, highest = Path("/proc/sys/net/ipv4/ping_group_range").read_text().split()
    cost = "one process carries all bytes, and connections end with the node's restart"
    pings = "" if int(lowest) <= int(highest) else "; no ping passes (net.ipv4.ping_group_range)"
    return ok(name, f"in user space: nothing of this host is changed; {cost}{pings}")


def _look_at_forwarding() -> Check:
    try:
        is_on = Path("/proc/sys/net/ipv4/ip_forward").read_text().strip() == "1"
    except OSError as error:
        return missing("forwarding", f"this kernel does not forward: {error}", fix="uname -a")
    return ok("forwarding", "net.ipv4.ip_forward is 1" if is_on else "off; the node turns it on as it starts")


def _look_at_forward_chains(host: Host) -> Check:
    """Chains of others that drop what is forwarded, as Docker's do: no rule of ours can undo that."""
    from cpuos.node.network.plan import host_link

    name = "forward chains"
    if os.geteuid() != 0:
        return warn(name, "only root can list them", fix="sudo cpuos doctor")
    link = host_link(host.settings.instance_id)
    for chain in _dropping_chains(host.read(["nft", "--json", "list", "ruleset"]) or ""):
        if link not in chain["rules"]:
            place = f"{chain['family']} {chain['table']} {chain['name']}"
            return warn(
                name,
                f"{place} drops what it does not know: sandboxes reach nothing outside",
                fix=f"nft insert rule {place} iifname {link} accept; "
                f"nft insert rule {place} oifname {link} ct state established,related accept",
            )
    legacy = host.read(["iptables-legacy", "-S", "FORWARD"]) or ""
    if "-P FORWARD DROP" in legacy and link not in legacy:
        cure = (
            f"iptables-legacy -I FORWARD -i {link} -j ACCEPT; "
            f"iptables-legacy -I FORWARD -o {link} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
        )
        return warn(name, "iptables' FORWARD drops what it does not know: sandboxes reach nothing outside", fix=cure)
    return ok(name, "none that drops what sandboxes send")


def _dropping_chains(listing: str) -> Iterator[dict[str, Any]]:
    """Base chains of IPv4 forwarding whose policy is drop, with the text of their rules."""
    try:
        entries = json.loads(listing)["nftables"]
    except (ValueError, KeyError, TypeError):
        return
    rules = [entry["rule"] for entry in entries if "rule" in entry]
    for entry in entries:
        chain = entry.get("chain", {})
        if chain.get("hook") != "forward" or chain.get("policy") != "drop" or chain["family"] not in ("ip", "inet"):
            continue
        place = (chain["family"], chain["table"], chain["name"])
        own = [rule for rule in rules if (rule["family"], rule["table"], rule["chain"]) == place]
        yield {**chain, "rules": json.dumps(own)}
