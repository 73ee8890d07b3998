"""What an alarm does beside telling: the sandbox is paused or killed, by the verbs that people use, and the audit says
by which rule."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row

from cpuos.errors import CapacityExceeded, CpuosError, SandboxGone, Unavailable
from cpuos.server.audit import SYSTEM, Audit, Intent
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.episodes import Episode, describe
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.pausing import Pausing
from cpuos.types.alarms import AlarmAction
from cpuos.types.audit import AuditResult

__all__ = ["AlarmActions"]

# So long a sandbox may be unwilling to stand still, before it is killed: else it could go on for ever.
_UNWILLING = timedelta(seconds=60)


class AlarmActions:
    def __init__(
        self, database: Database, *, lifecycle: Lifecycle, pausing: Pausing, audit: Audit, clock: Clock
    ) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._pausing = pausing
        self._audit = audit
        self._clock = clock
        self._unwilling: dict[str, datetime] = {}
        """By sandbox: since when it could not be paused by its own fault."""

    def forget(self, sandbox_id: str) -> None:
        """Its alarm is over."""
        self._unwilling.pop(sandbox_id, None)

    async def take(self, row: Row[Any], episode: Episode) -> None:
        """Return when it is paused or gone; what fails is to be tried again."""
        reason = (
            f"alarm of the {episode.origin} ({episode.rule.text}): {describe(episode.rule, episode.used, cpu=row.cpu)}"
        )
        if episode.rule.action is AlarmAction.KILL:
            await self._kill(row, reason=reason)
            return
        try:
            await self._pausing.pause(row, reason=reason, firmly=True)
        except (Unavailable, CapacityExceeded, SandboxGone):
            raise  # the node's own trouble, or it has ended
        except CpuosError as error:
            if self._clock() < self._unwilling.setdefault(row.id, self._clock()) + _UNWILLING:
                raise
            await self._kill(row, reason=f"{reason}, and it could not be paused: {error.why or error.what}")

    async def _kill(self, row: Row[Any], *, reason: str) -> None:
        async with self._database.write() as connection:
            intent = await self._audit.intend(
                connection,
                workspace=row.workspace,
                actor=SYSTEM,
                action="sandbox.kill",
                target=row.id,
                detail={"reason": reason},
            )
        try:
            await self._lifecycle.kill(row, reason=reason)
        except CpuosError as error:
            told = {"reason": reason, "code": error.code, "what": error.what}
            await self._conclude(row, intent, result=AuditResult.ERROR, detail=told)
            raise
        await self._conclude(row, intent, result=AuditResult.OK, detail={"reason": reason})

    async def _conclude(self, row: Row[Any], intent: Intent, *, result: AuditResult, detail: dict[str, Any]) -> None:
        async with self._database.write() as connection:
            await self._audit.conclude(connection, intent, result=result, sandbox=row.id, detail=detail)
