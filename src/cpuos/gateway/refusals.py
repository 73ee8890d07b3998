"""What a command tried to reach and was not allowed to: asked of the node's records worker as the command ends."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import structlog
from pydantic import TypeAdapter, ValidationError

from cpuos.types.base import Answer
from cpuos.types.network import ConnectionKind, RefusedConnection

__all__ = ["LocalRefusals", "Refusals", "explain"]

ASK_S = 0.5
"""An end is not held up longer than this; what is not known by then is told as not known."""
KEPT = 256
"""Refusals remembered of a sandbox, the newest."""
TOLD = 50
"""Refusals told with one command, the first."""
MAX_ANSWER = 1 << 20

log = structlog.get_logger("gateway.refusals")


class Refusals(Protocol):
    async def since(self, sandbox_id: str, moment: datetime) -> list[RefusedConnection] | None:
        """What the sandbox was refused from then on, in order; None when nobody can say."""
        ...

    def forget(self, sandbox_id: str) -> None:
        """The sandbox has ended."""
        ...


class _Refusal(Answer):
    at: datetime
    until: datetime | None = None
    """Equal ones within a second are one: when the last of them came."""
    kind: ConnectionKind
    name: str | None = None
    address: str | None = None
    port: int | None = None
    rule: str
    count: int = 1


class _Page(Answer):
    instance: str = ""
    refusals: list[_Refusal]
    next: int


_PAGE = TypeAdapter(_Page)


class LocalRefusals:
    """Over the records worker's unix socket, one kept connection."""

    def __init__(self, records_socket: Path) -> None:
        self._socket = records_socket
        self._known: dict[str, _Known] = {}
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._silent = False

    async def since(self, sandbox_id: str, moment: datetime) -> list[RefusedConnection] | None:
        try:
            async with asyncio.timeout(ASK_S), self._lock:
                known = self._known.setdefault(sandbox_id, _Known())
                page = await self._ask(sandbox_id, after=known.next)
                if known.next and page.instance != known.instance:
                    known.reset()  # a worker that started anew counts anew
                    page = await self._ask(sandbox_id, after=0)
                known.take(page)
        except (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError) as problem:
            self._drop()
            if not self._silent:  # said once, until it answers again
                log.warning("refusals.unknown", why=str(problem) or type(problem).__name__)
            self._silent = True
            return None
        self._silent = False
        return [_told(refusal, moment) for refusal in known.recent if (refusal.until or refusal.at) >= moment][:TOLD]

    def forget(self, sandbox_id: str) -> None:
        self._known.pop(sandbox_id, None)

    async def aclose(self) -> None:
        self._drop()

    async def _ask(self, sandbox_id: str, *, after: int) -> _Page:
        target = f"/v1/sandboxes/{sandbox_id}/refusals?after={after}"
        reused = self._streams is not None
        try:
            return await self._exchange(target)
        except (OSError, EOFError):
            self._drop()
            if not reused:
                raise
            return await self._exchange(target)  # the worker had closed the kept connection

    async def _exchange(self, target: str) -> _Page:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._socket, limit=64 << 10)
        reader, writer = self._streams
        try:
            writer.write(f"GET {target} HTTP/1.1\r\nHost: records\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status, length = _read_head(head)
            body = await reader.readexactly(length)
        except BaseException:
            self._drop()  # half an answer would be taken for the next one's
            raise
        if "connection: close" in head:
            self._drop()
        if status != 200:
            raise ValueError(f"the records worker answered {status}: {body[:200]!r}")
        try:
            return _PAGE.validate_json(body)
        except ValidationError as problem:
            raise ValueError(f"its answer is out of contract: {problem.errors()[0]['msg']}") from problem

    def _drop(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class _Known:
    def __init__(self) -> None:
        self.next = 0
        self.instance = ""
        self.recent: deque[_Refusal] = deque(maxlen=KEPT)

    def reset(self) -> None:
        self.next = 0
        self.recent.clear()

    def take(self, page: _Page) -> None:
        self.instance = page.instance
        self.recent.extend(page.refusals)
        self.next = page.next


def explain(refusal: Any) -> str:
    """One sentence or two that tell a person or a model what happened and what would help."""
    place = refusal.name or refusal.address or "a destination"
    where = f"{place}:{refusal.port}" if refusal.port is not None else place
    if refusal.rule == "no uplink":
        what = f"The name {place}" if refusal.kind is ConnectionKind.DNS else f"The connection to {where}"
        return f"{what} was refused: this machine has no way out to it ({refusal.rule}). Do not try again."
    if refusal.kind is ConnectionKind.DNS and refusal.rule.startswith("always blocked"):
        happened = f"The name {place} was not resolved: it, or the address it leads to, is off limits ({refusal.rule})."
    elif refusal.kind is ConnectionKind.DNS:
        happened = f"The name {place} was not resolved: network policy refused it ({refusal.rule})."
    else:
        happened = f"The connection to {where} was refused by network policy ({refusal.rule})."
    if refusal.rule.startswith("always blocked"):
        return f"{happened} This is blocked for every sandbox; do not try again."
    if "allow list" in refusal.rule:
        return f"{happened} Trying again will not help; whoever owns the sandbox can add {where} to its allow list."
    return f"{happened} Trying again will not help; whoever owns the sandbox can change its network policy."


def _told(refusal: _Refusal, moment: datetime) -> RefusedConnection:
    fields = refusal.model_dump(exclude={"until"})
    if refusal.until is not None and refusal.at < moment:
        fields["at"] = refusal.until  # it began before the command did, which is told of its own; the count is of both
    return RefusedConnection(**fields, reason=explain(refusal))


def _read_head(head: str) -> tuple[int, int]:
    lines = head.split("\r\n")
    status = int([*lines[0].split(" "), ""][1])
    lengths = [line.partition(":")[2] for line in lines[1:] if line.startswith("content-length:")]
    length = int(lengths[0]) if len(lengths) == 1 else -1
    if not 0 <= length <= MAX_ANSWER:
        raise ValueError("its answer has no length, or is too long")
    return status, length
