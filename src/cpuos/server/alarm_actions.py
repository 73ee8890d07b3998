"""What an alarm does beside telling: the sandbox is paused or killed, by the verbs that people use, and the audit says
by which rule."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from cpuos.errors import CapacityExceeded, CpuosError, Unavailable
from cpuos.server.audit import SYSTEM, Audit
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.episodes import Episode, describe
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.pausing import Pausing
from cpuos.types.alarms import AlarmAction
from cpuos.types.audit import AuditResult

__all__ = ["AlarmActions"]

# So long after its alarm a sandbox may be unwilling to stand still, before it is killed: else it could go on for ever.
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
        except (Unavailable, CapacityExceeded):
            raise  # the node's own trouble
        except CpuosError as error:
            if self._clock() < episode.since + _UNWILLING:
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
        result, detail = AuditResult.ERROR, {"reason": reason}
        try:
            await self._lifecycle.kill(row, reason=reason)
            result = AuditResult.OK
        except CpuosError as error:
            detail |= {"code": error.code, "what": error.what}
            raise
        finally:
            async with self._database.write() as connection:
                await self._audit.conclude(connection, intent, result=result, sandbox=row.id, detail=detail)
