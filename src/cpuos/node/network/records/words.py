"""Which rule decided, in words. Pure: the kernel says yes or no and by which version of the policy; this says why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address, IPv4Network

from cpuos.node.network.judge import Judge
from cpuos.node.network.records.nflog import LoggedPacket
from cpuos.node.network.surroundings import EVERYWHERE, NO_UPLINK, is_reached
from cpuos.types.blocked import Exemption, blocked_reason
from cpuos.types.network import EffectivePolicy

__all__ = ["Words"]

_VERSIONS = 8
LIMIT = "limit: too many connections"


class Words:
    """For one sandbox; earlier versions of its policy are kept a while, since records come late."""

    def __init__(self, policy: EffectivePolicy, *, exemptions: Collection[Exemption]) -> None:
        self._exemptions = tuple(exemptions)
        self._judges: OrderedDict[int, Judge] = OrderedDict()
        self.set_policy(policy)

    def set_policy(self, policy: EffectivePolicy) -> None:
        self._judges[policy.version] = self._newest = Judge(policy)
        self._judges.move_to_end(policy.version)
        while len(self._judges) > _VERSIONS:
            self._judges.popitem(last=False)

    def allowed(self, packet: LoggedPacket, version: int | None, names: Sequence[str]) -> str:
        judgement = self._judge(version).destination(
            packet.address, protocol=packet.protocol, port=packet.port, names=names
        )
        return judgement.rule if judgement.allowed else "allowed by an earlier policy"

    def named(self, address: IPv4Address, port: int, names: Sequence[str], *, rule: str) -> str:
        """Of what the peek let through unread: the rule of the names that the address was answered for."""
        judgement = self._newest.destination(address, protocol="tcp", port=port, names=names)
        return judgement.rule if judgement.allowed and names else rule

    def refused(
        self,
        packet: LoggedPacket,
        version: int | None,
        names: Sequence[str],
        *,
        is_limit: bool,
        host_addresses: Collection[IPv4Address],
        reach: Collection[IPv4Network] = EVERYWHERE,
    ) -> str:
        if is_limit:
            return LIMIT
        if packet.protocol == "other":
            return "always blocked: a protocol other than TCP, UDP and ping"
        if not packet.begins:
            return "always blocked: a packet that begins no connection"
        blocked = blocked_reason(
            packet.address,
            protocol=packet.protocol,
            port=packet.port,
            exemptions=self._exemptions,
            host_addresses=host_addresses,
        )
        if blocked is not None:
            return f"always blocked: {blocked}"
        judge = self._judge(version)
        judgement = judge.destination(packet.address, protocol=packet.protocol, port=packet.port, names=names)
        if not judgement.allowed:
            return judgement.rule
        if not is_reached(packet.address, reach):
            return NO_UPLINK
        if names:
            return "the address is not current for the name: look it up again"
        return "refused by an earlier policy"

    def _judge(self, version: int | None) -> Judge:
        return self._judges.get(version or 0, self._newest)
