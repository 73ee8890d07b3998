"""The sockets of a router that unprivileged workers serve. Whoever holds one of them holds the namespace too."""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path

from cpuos.node.network.log_sockets import open_log
from cpuos.node.network.namespaces import inside
from cpuos.node.network.rules import PEEK_PORT
from cpuos.runtimes.base import ROUTER_ADDRESS

__all__ = ["DNS_PORT", "close_all", "open_for_workers"]

DNS_PORT = 53
_BACKLOG = 512


def open_for_workers(workers: Collection[str], router: Path) -> dict[str, list[socket.socket]]:
    """What each of these wants with `open`. The caller closes them when they were handed over: where no worker serves,
    the guest is to be refused at once, and not to wait."""

    def open_all() -> dict[str, list[socket.socket]]:
        opened: dict[str, list[socket.socket]] = {}
        try:
            for worker in workers:
                opened[worker] = _OPENERS[worker]()
        except BaseException:
            close_all(opened)
            raise
        return opened

    return inside(router, open_all)


def close_all(opened: dict[str, list[socket.socket]]) -> None:
    for sockets in opened.values():
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


_OPENERS = {"dns": _open_dns, "peek": lambda: [_listen(PEEK_PORT)], "records": lambda: [open_log()]}
