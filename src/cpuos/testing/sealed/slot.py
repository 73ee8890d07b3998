"""One slot of the sealed world, with native programs in the place where a sandbox would be."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from cpuos.node.network.namespaces import inside
from cpuos.node.network.plan import SlotPlan
from cpuos.node.network.slot import guest_name, make_slot, release_slot, router_name

__all__ = ["SealedSlot"]

T = TypeVar("T")

_OPEN = """
table ip open {{
  chain post {{
    type nat hook postrouting priority srcnat;
    oifname "wan" snat to {address}
  }}
}}
"""


class SealedSlot:
    """Made and removed by `with`."""

    def __init__(
        self, folder: Path, plan: SlotPlan, *, hub: Path, load_rules: Callable[[SlotPlan], None] | None
    ) -> None:
        self.folder = folder
        self.plan = plan
        self._hub = hub
        self._load_rules = load_rules or _let_pass

    def __enter__(self) -> Self:
        try:
            make_slot(self.folder, self.plan, hub=self._hub, load_rules=self._load_rules)
        except BaseException:
            release_slot(self.folder)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        release_slot(self.folder)

    @property
    def router(self) -> Path:
        """The router's namespace."""
        return router_name(self.folder)

    @property
    def guest(self) -> Path:
        """The guest's namespace."""
        return guest_name(self.folder)

    def in_router(self, work: Callable[[], T]) -> T:
        return inside(self.router, work)

    def in_guest(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread in the guest's place; sockets it makes stay there."""
        return inside(self.guest, work)

    def socket(self, kind: int = socket.SOCK_STREAM, *, timeout_s: float = 20.0) -> socket.socket:
        """An IPv4 socket made in the guest's place."""
        made = self.in_guest(lambda: socket.socket(socket.AF_INET, kind))
        made.settimeout(timeout_s)
        return made

    def connect(self, address: str, port: int, *, timeout_s: float = 20.0) -> str:
        """Try TCP: "connected", or the name of what came instead: ConnectionRefusedError, TimeoutError, OSError."""
        with self.socket(timeout_s=timeout_s) as made:
            try:
                made.connect((address, port))
            except OSError as error:
                return type(error).__name__
            return "connected"

    def ask_udp(self, address: str, port: int, payload: bytes = b"?", *, timeout_s: float = 20.0) -> bytes | str:
        """Send a datagram: the answer, or the name of what came instead."""
        with self.socket(socket.SOCK_DGRAM, timeout_s=timeout_s) as made:
            try:
                made.connect((address, port))
                made.send(payload)
                return made.recv(65535)
            except OSError as error:
                return type(error).__name__

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """A program in the guest's place."""
        command = ["nsenter", f"--net={self.guest}", "--", *argv]
        return subprocess.run(
            command, **{"capture_output": True, "text": True, "timeout": 60, "check": False, **options}
        )

    def python(self, code: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, "-c", code], **options)


def _let_pass(plan: SlotPlan) -> None:
    rules = _OPEN.format(address=plan.address)
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True, capture_output=True)
