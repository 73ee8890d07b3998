"""Ports that stay free for who took them, also between two lives of a part that listens there.

They are not among those that the kernel gives to outgoing connections, and tests that run beside each other take turns.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["TestPorts"]

_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_BELOW = (10_000, 32_768)


class TestPorts:
    """Holds what it has given until it is closed."""

    __test__ = False

    def __init__(self, *, dice: random.Random | None = None) -> None:
        self._dice = dice or random.SystemRandom()
        self._marks: list[socket.socket] = []
        first = int(_GIVEN_OUT.read_text().split()[0])
        self._range = range(_BELOW[0], first if first > 2 * _BELOW[0] else _BELOW[1])

    def take(self) -> int:
        while True:
            port = self._dice.choice(self._range)
            mark = socket.socket(socket.AF_UNIX)
            try:
                mark.bind(f"\0cpuos-testing-port-{port}")  # goes with the process
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            except OSError:
                mark.close()
                continue
            self._marks.append(mark)
            return port

    def close(self) -> None:
        for mark in self._marks:
            mark.close()
        self._marks.clear()
