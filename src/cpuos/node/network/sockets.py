"""The sockets of a router that unprivileged workers serve. Whoever holds one of them holds the namespace too."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpuos.node.network.log_sockets import open_log_socket
from cpuos.node.network.namespaces import inside
from cpuos.node.network.rules import PEEK_PORT
from cpuos.runtimes.base import ROUTER_ADDRESS

__all__ = ["DNS_PORT", "open_for_worker"]

DNS_PORT = 53
_BACKLOG = 512


@contextmanager
def open_for_worker(worker: str, router: Path) -> Iterator[list[int]]:
    """Descriptors for one worker's `open`, closed behind it: none stays here, so that where no worker serves the guest
    is refused at once instead of waiting."""
    sockets: list[socket.socket] = []
    try:
        if worker == "dns":
            sockets += inside(router, _open_dns)
        elif worker == "peek":
            sockets.append(inside(router, lambda: _listen(PEEK_PORT)))
        else:
            sockets.append(open_log_socket(router))
        yield [made.fileno() for made in sockets]
    finally:
        for made in sockets:
            made.close()


def _open_dns() -> list[socket.socket]:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        udp.bind((ROUTER_ADDRESS, DNS_PORT))
        return [udp, _listen(DNS_PORT)]
    except BaseException:
        udp.close()
        raise


def _listen(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((ROUTER_ADDRESS, port))
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made
