"""Answers of one sandbox, kept for their TTL. Each has its own: in a shared one it could read what others ask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from cpuos.node.network.forwarder.query import Query
from cpuos.node.network.forwarder.replies import WireReply

__all__ = ["AnswerCache"]


class AnswerCache:
    """Least recently used go first. The key is the question's; a change of policy empties it."""

    def __init__(self, *, clock: Callable[[], float], max_entries: int, max_bytes: int) -> None:
        self._clock = clock
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[Hashable, tuple[float, int, WireReply]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, query: Query) -> bytes | None:
        """The answer to this question, its TTLs lowered by its age."""
        key = query.key
        entry = self._entries.get(key)
        if entry is None:
            return None
        born, lifetime_s, reply = entry
        age_s = int(self._clock() - born)
        if not 0 <= age_s < lifetime_s:
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return reply.for_query(query, age_s=age_s)

    def keep(self, query: Query, reply: WireReply, *, lifetime_s: int) -> None:
        if lifetime_s <= 0 or len(reply) > self._max_bytes:
            return
        self._remove(query.key)
        self._entries[query.key] = (self._clock(), lifetime_s, reply)
        self.size_bytes += len(reply)
        while len(self._entries) > self._max_entries or self.size_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0

    def _remove(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= len(entry[2])
