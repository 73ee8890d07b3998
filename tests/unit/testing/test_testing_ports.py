"""Ports of instances: nobody else gets them, neither tests beside nor the kernel for a connection that goes out."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from cpuos.testing.ports import TestPorts


def test_no_port_is_given_twice() -> None:
    first, second = (TestPorts(dice=random.Random(7)) for _ in range(2))
    taken = [ports.take() for _ in range(50) for ports in (first, second)]
    assert len(set(taken)) == 100
    first.close()
    second.close()
    again = TestPorts(dice=random.Random(7))
    assert again.take() == taken[0]
    again.close()


def test_the_kernel_gives_them_to_nobody() -> None:
    ports = TestPorts()
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert ports.take() < max(first, 32_768)
    ports.close()


def test_what_somebody_listens_on_is_passed_over() -> None:
    ports = TestPorts(dice=random.Random(8))
    taken = ports.take()
    ports.close()
    with socket.create_server(("127.0.0.1", taken)):
        ports = TestPorts(dice=random.Random(8))
        assert ports.take() != taken
        ports.close()
