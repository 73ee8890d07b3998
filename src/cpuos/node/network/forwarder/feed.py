"""Records for the records worker: datagrams that are never waited for; what is lost is counted and told later."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

__all__ = ["Feed"]


class Feed:
    """One end of a SOCK_DGRAM pair, or nobody's (tests)."""

    def __init__(self, end: socket.socket | None, *, clock: Callable[[], float]) -> None:
        self._end, self._clock = end, clock
        self._lost: Counter[str] = Counter()
        if end is not None:
            end.setblocking(False)

    def refused(self, sandbox: str, name: str, *, rule: str) -> None:
        """A name that was asked for and refused."""
        self._send({"sandbox": sandbox, "kind": "dns", "name": name, "verdict": "refused", "rule": rule})

    def resolved(self, sandbox: str, name: str, address: str, *, ttl_s: int) -> None:
        """From now on connections to `address` may be `name`'s."""
        self._send({"sandbox": sandbox, "event": "resolved", "name": name, "address": address, "ttl_s": ttl_s})

    def close(self) -> None:
        if self._end is not None:
            self._end.close()

    def _send(self, record: dict[str, Any]) -> None:
        if self._end is None:
            return
        try:
            while self._lost:
                sandbox, count = next(iter(self._lost.items()))
                self._end.send(json.dumps({"sandbox": sandbox, "event": "lost", "count": count}).encode())
                del self._lost[sandbox]
            self._end.send(json.dumps({**record, "at": self._clock()}).encode())
        except OSError:  # full, or nobody reads at the moment
            if record.get("event") != "resolved":
                self._lost[record["sandbox"]] += 1
