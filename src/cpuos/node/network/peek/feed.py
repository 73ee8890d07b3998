"""What the peek tells the records worker: each connection that it carries, and each that it refuses."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from ipaddress import IPv4Address

from cpuos.node.network.forwarder.feed import Feed

__all__ = ["PeekFeed"]


class PeekFeed(Feed):
    """As that of the forwarder: never waited for, what is lost is told later."""

    def __init__(self, end: socket.socket | None, *, clock: Callable[[], float]) -> None:
        super().__init__(end, clock=clock)
        self._process = secrets.token_hex(4)  # ids of an earlier process are not taken for these
        self._last = 0

    def opened(
        self, sandbox: str, address: IPv4Address, port: int, *, name: str | None, rule: str, source_port: int | None
    ) -> str:
        """An id, for its end."""
        self._last += 1
        number = f"{self._process}-{self._last}"
        record = {"sandbox": sandbox, "event": "open", "id": number, "kind": "tcp", "name": name, "rule": rule}
        self._send({**record, "address": str(address), "port": port, "source_port": source_port})
        return number

    def closed(self, sandbox: str, number: str, *, sent: int, received: int) -> None:
        record = {"sandbox": sandbox, "event": "closed", "id": number}
        self._send({**record, "bytes_sent": sent, "bytes_received": received})

    def refused_connection(self, sandbox: str, address: IPv4Address, port: int, *, name: str | None, rule: str) -> None:
        record = {"sandbox": sandbox, "event": "refused", "kind": "tcp", "name": name, "verdict": "refused"}
        self._send({**record, "address": str(address), "port": port, "rule": rule})
