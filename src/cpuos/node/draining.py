"""The node's shutdown: every sandbox that runs is paused, so that a reboot loses nothing that ran.

From its beginning until this daemon ends nothing new runs here. What cannot be paused in the time runs on, and is
named.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog

from cpuos.errors import CpuosError, Unavailable
from cpuos.node.journal import Record, Stage
from cpuos.node.ledger import Ledger
from cpuos.types.node import Drained, SandboxFacts

__all__ = ["SHUT_DOWN", "Door", "Draining"]

log = structlog.get_logger("cpuos.node")

SHUT_DOWN = "its node was shut down"
# More at the same time end no sooner: each writes its memory.
_AT_ONCE = 2


class Door(Protocol):
    """The way to the guests' agents, which is the gateway's."""

    async def suspend(self, sandbox_id: str, *, freeze: str, limit_s: float) -> str:
        """Its programs stand still; else why not."""
        ...

    async def go_on(self, sandbox_id: str, *, generation: int, hostname: str, limit_s: float) -> None:
        """What stood still goes on, if it can."""
        ...


class Draining:
    def __init__(
        self, ledger: Ledger, *, door: Door | None, pause: Callable[..., Coroutine[Any, Any, SandboxFacts]]
    ) -> None:
        self._ledger = ledger
        self._door = door
        self._pause = pause
        self._begun = False

    def check(self, verb: str, sandbox_id: str) -> None:
        if self._begun:
            raise Unavailable(
                f"cannot {verb} sandbox: {sandbox_id}",
                "its node is shutting down",
                code="node_unavailable",
                hint="cpuos up",
            )

    async def drain(self, *, limit_s: float) -> Drained:
        """May be repeated."""
        self._begun = True
        end = time.monotonic() + limit_s
        free = asyncio.Semaphore(_AT_ONCE)
        left: dict[str, str] = {}

        async def one(record: Record) -> str | None:
            async with free:
                try:
                    why = await self._stop(record, end=end)
                except Exception as error:
                    log.exception("sandbox not paused", sandbox=record.id)
                    why = str(error) or type(error).__name__
            if why:
                left[record.id] = why
                log.warning("sandbox not paused: it runs on", sandbox=record.id, why=why)
            return None if why else record.id

        running = [record for record in self._ledger.all() if record.stage is Stage.RUNNING]
        paused = [one_id for one_id in await asyncio.gather(*map(one, running)) if one_id]
        log.info("node drained", paused=len(paused), left=len(left))
        return Drained(paused=sorted(paused), left=left)

    async def _stop(self, record: Record, *, end: float) -> str:
        """Empty when it is paused, else why not."""
        limit_s = end - time.monotonic()
        if limit_s <= 0:
            return "there was no time left"
        if self._door is None:
            return "there is no way to its agent"
        freeze = secrets.token_hex(16)
        why = await self._door.suspend(record.id, freeze=freeze, limit_s=limit_s)
        if why:
            return why
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                await self._pause(record.id, generation=record.generation, freeze=freeze, reason=SHUT_DOWN)
            return ""
        except (CpuosError, TimeoutError) as error:
            current = self._ledger.find(record.id)
            if current is not None and current.stage is Stage.RUNNING:
                hostname = record.request.hostname
                await self._door.go_on(record.id, generation=record.generation, hostname=hostname, limit_s=5.0)
            return "there was no time left" if isinstance(error, TimeoutError) else error.why or error.what
