"""Makes slots: on the spot, or in a helper process that fills the pool (`python -m cpuos.node.network.maker FD`).

A slot is some thirty milliseconds of work in threads that change their namespace: in the node's own process other work
would wait for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.plan import BlockPlan, SlotPlan
from cpuos.node.network.rules import base_rules
from cpuos.node.network.slot import make_slot, release_slot
from cpuos.node.network.surroundings import Surroundings
from cpuos.types.blocked import Exemption

__all__ = ["SlotRecipe", "main"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PACKET_BYTES = 60 << 10


@dataclass(frozen=True, kw_only=True)
class SlotRecipe:
    """All that slots of an instance have in common."""

    folder: Path
    hub: Path
    block: IPv4Network
    exemptions: tuple[Exemption, ...] = ()
    surroundings: Surroundings = field(default_factory=Surroundings)
    limits: NetworkLimits = field(default_factory=NetworkLimits)
    tap: bool = False
    """For guests with a kernel of their own."""

    def make(self, number: int) -> None:
        """Make slot `number`, whole or not at all. Its router lets nothing pass until it has a policy."""
        folder = self.folder / str(number)
        try:
            plan = BlockPlan(network=self.block).slot(number)
            make_slot(folder, plan, hub=self.hub, load_rules=self._load_rules, tap=self.tap)
        except BaseException:
            release_slot(folder)
            raise

    def rules(self, plan: SlotPlan) -> str:
        """The base rules of its router."""
        return base_rules(plan, limits=self.limits, exemptions=self.exemptions, surroundings=self.surroundings)

    def _load_rules(self, plan: SlotPlan) -> None:
        context = NftContext()
        try:
            context.run(self.rules(plan))
        finally:
            context.close()

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "hub": str(self.hub),
            "block": str(self.block),
            "exemptions": [
                {"name": rule.name, "address": str(rule.address), "port": rule.port, "protocol": rule.protocol}
                for rule in self.exemptions
            ],
            "host_addresses": [str(address) for address in self.surroundings.addresses],
            "reach": [str(network) for network in self.surroundings.reach],
            "limits": asdict(self.limits),
            "tap": self.tap,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SlotRecipe:
        return cls(
            folder=Path(value["folder"]),
            hub=Path(value["hub"]),
            block=IPv4Network(value["block"]),
            exemptions=tuple(
                Exemption(**{**rule, "address": IPv4Address(rule["address"])}) for rule in value["exemptions"]
            ),
            surroundings=Surroundings(
                addresses=tuple(map(IPv4Address, value["host_addresses"])),
                reach=tuple(map(IPv4Network, value["reach"])),
            ),
            limits=NetworkLimits(**value["limits"]),
            tap=bool(value["tap"]),
        )


def main() -> None:
    """Each packet asks for a slot: {"make": N, "recipe": …}; the answer is {"made": N} or {"failed": N, "why": …}."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the node, which ends this process
    with socket.socket(fileno=int(sys.argv[1])) as node:
        while packet := node.recv(_PACKET_BYTES):
            asked = json.loads(packet)
            number = int(asked["make"])
            try:
                SlotRecipe.from_json(asked["recipe"]).make(number)
                answer: dict[str, Any] = {"made": number}
            except Exception as error:
                answer = {"failed": number, "why": f"{type(error).__name__}: {error}"[:500]}
            node.send(json.dumps(answer).encode())


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        raise SystemExit("the node is gone")


if __name__ == "__main__":
    main()
