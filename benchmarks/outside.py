"""TCP from a sandbox to the outside through router, hub and host, against gVisor on one veth with one masquerade.

Everything lies in a sealed network: the outside is a namespace of this machine. The bare sandbox is one of the same
instance whose device was taken out of its router and joined to the host.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.results import Measured, compare_rates
from benchmarks.stage import Stage, put_first
from cpuos import Sandbox
from cpuos.node.network.namespaces import inside
from cpuos.runtimes.base import ROUTER_ADDRESS
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses

__all__ = ["tcp_outside", "tcp_outside_in_user_space"]

SIZE_BYTES = 128 << 20
_ORDERS, _BYTES = 9100, 9101
_PIECE = 1 << 20
# Waits for the word, takes the bytes, and tells how long that took.
_GUEST = f"""
import socket, struct, time
orders = socket.create_connection(("{addresses.WEB}", {_ORDERS}))
buffer = bytearray(1 << 20)
while orders.recv(1):
    began = time.monotonic()
    with socket.create_connection(("{addresses.WEB}", {_BYTES})) as made:
        while made.recv_into(buffer):
            pass
    orders.sendall(struct.pack("!d", time.monotonic() - began))
"""


def tcp_outside(stage: Stage) -> Measured:
    """Bytes a second that a program of the sandbox gets from outside."""
    return _compare(stage, uplink="nat")


def tcp_outside_in_user_space(stage: Stage) -> Measured:
    """The same by the uplink in user space, against the same bare sandbox."""
    return _compare(stage, uplink="user")


def _compare(stage: Stage, *, uplink: str) -> Measured:
    with SealedWorld() as world, world.instance(max_sandboxes=2, network_uplink=uplink) as instance:
        put_first(instance.settings.instance_id, processes=[os.getpid()])
        with _outside(world) as orders:
            bare = _begin(instance, orders, bare=True)
            product = _begin(instance, orders, bare=False)
            with bare, product:
                times: tuple[list[float], list[float]] = ([], [])
                for _ in range(max(9, 2 * stage.rounds) + 1):
                    for side, kept in zip((product, bare), times, strict=True):
                        side.sendall(b"g")
                        kept.append(struct.unpack("!d", side.recv(8, socket.MSG_WAITALL))[0])
        return compare_rates(times[0][1:], times[1][1:], size_bytes=SIZE_BYTES)


def _begin(instance: SealedInstance, orders: socket.socket, *, bare: bool) -> socket.socket:
    """A sandbox with the guest's program; the connection on which it takes orders."""
    sandbox = Sandbox.create(client=instance.client(), template="python")
    sandbox.files.write("guest.py", "import time\ntime.sleep(1)\n" + _GUEST)
    sandbox.spawn("exec python3 guest.py")
    if bare:
        _bypass(instance, sandbox.id)
    connection, _ = orders.accept()
    return connection


def _bypass(instance: SealedInstance, sandbox_id: str) -> None:
    """Join the sandbox's device to the host: no router, no rules, nothing of the product in the way."""
    node = instance.pids()["node"]
    router = f"{instance.settings.run_dir}/netns/{sandbox_id}.slot/router"
    to_router = ["nsenter", f"--mount=/proc/{node}/ns/mnt", "nsenter", f"--net={router}"]
    at_host = ["nsenter", f"--net=/proc/{node}/ns/net"]
    rules = "add table ip bare; add chain ip bare post { type nat hook postrouting priority srcnat; };"
    rules += "add rule ip bare post ip saddr 10.0.0.2 masquerade"
    for command in (
        [*to_router, "ip", "link", "set", "lan", "netns", str(node)],
        [*at_host, "ip", "address", "add", f"{ROUTER_ADDRESS}/30", "dev", "lan"],
        [*at_host, "ip", "link", "set", "lan", "up"],
        [*at_host, "sysctl", "-qw", "net.ipv4.ip_forward=1"],
        [*at_host, "nft", rules],
    ):
        subprocess.run(command, check=True)


@contextmanager
def _outside(world: SealedWorld) -> Iterator[socket.socket]:
    """A server on every outside address that gives bytes, and the socket on which guests come for orders."""

    def listen() -> tuple[socket.socket, socket.socket]:
        return socket.create_server(("0.0.0.0", _ORDERS)), socket.create_server(("0.0.0.0", _BYTES))

    orders, source = inside(world.internet, listen)
    orders.settimeout(60)
    with orders, source:
        threading.Thread(target=_give, args=(source,), daemon=True).start()
        yield orders
        source.shutdown(socket.SHUT_RDWR)


def _give(source: socket.socket) -> None:
    piece = memoryview(bytes(_PIECE))
    while True:
        try:
            connection, _ = source.accept()
        except OSError:  # it was shut down
            return
        with connection:
            for _ in range(SIZE_BYTES // _PIECE):
                connection.sendall(piece)
