"""The page of what is always blocked, from the table that the rules are made of."""

from __future__ import annotations

from cpuos.node.network.forwarder.sandbox import Limits
from cpuos.settings import Settings
from cpuos.types.blocked import ALWAYS_BLOCKED, BLOCKED_PORTS
from cpuos.types.special_names import SPECIAL_NAMES

__all__ = ["render"]

_HEAD = """# Always blocked

No policy opens any of this: not a sandbox's, not a workspace's. A refusal names it as "always blocked: NAME".
The kernel's rules, the DNS forwarder (which removes such addresses from answers) and this page are made of one table,
`src/cpuos/types/blocked.py`.

An operator can lift the block of a range for a single service (host name, address, port) with the setting
`network_exceptions`; policies then judge that service as any other destination.
See [the how-to](../how-to/network-policies.md#install-packages-from-a-mirror).

## Addresses

| range | name | why |
|---|---|---|
"""

_REST = """| the host's own addresses | the host's own address | services of the host and of cpuOS itself |
| other sandboxes | private | their addresses are private, and the hub passes nothing from one sandbox to another |

## Ports

| TCP port | name | why |
|---|---|---|
"""

_NAMES = """
## Names

The DNS forwarder answers these itself, "no such name", and asks nobody. A name is any below the suffix, and the suffix.

| suffix | why |
|---|---|
"""

_NAMES_PER_S = Settings.model_fields["network_names_per_s"].default
_LIMITS = Limits.of_names(_NAMES_PER_S)
_NAMES_END = f"""| a name without a dot | the host's own network; only an operator's exception has one |
| reverse zones of the addresses above | they name machines of the operator's network |

Refused in every policy: questions of type ANY, AXFR, IXFR, NULL and of types that programs have no use for, other
classes than IN, and names over {_LIMITS.name_length} letters or {_LIMITS.labels} labels, which carry data. HTTPS and
SVCB records are answered empty, as AAAA: they would give addresses past the A record, and keys that hide a host name.
A sandbox may ask {_NAMES_PER_S} questions a second, {_LIMITS.new_names_per_s:g} of them new ones
([`network_names_per_s`](settings.md)).
"""

_END = """
## Protocols

- IPv6: sandboxes have none. A name's AAAA answer is empty, so programs do not wait for it.
- Everything but TCP, UDP and ICMP echo ("ping"): GRE, IPIP, SCTP, ESP and all others.
- A TCP connection whose first packet is not a bare SYN; packets with IP options; packets and frames whose source is not
  the sandbox's own address and MAC.

## Where names decide

With an allow list, or with a host name in a deny list, a connection is judged by its name. Ways around the forwarder
are closed then: DNS to other servers (port 53), DNS over TLS and QUIC (port 853) and QUIC (UDP port 443; browsers fall
back to TCP). An allow list that names the address itself opens them again for that address.
"""


def render() -> str:
    rows = [f"| `{one.network}` | {one.name} | {one.reason} |" for one in ALWAYS_BLOCKED]
    ports = [
        f"| {port} | {name} | mail from a sandbox puts its host on block lists |"
        for port, name in BLOCKED_PORTS.items()
    ]
    names = [f"| `{suffix}` | {reason} |" for suffix, reason in SPECIAL_NAMES.items()]
    return (
        _HEAD
        + "\n".join(rows)
        + "\n"
        + _REST
        + "\n".join(ports)
        + "\n"
        + _NAMES
        + "\n".join(names)
        + "\n"
        + _NAMES_END
        + _END
    )
