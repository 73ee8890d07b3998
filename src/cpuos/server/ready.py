"""What nodes have ready: the gateway is at the agents of these sandboxes before anyone asks for one, so that a create
finds it there."""

from __future__ import annotations

import structlog

from cpuos.errors import CpuosError
from cpuos.scheduler.base import Scheduler
from cpuos.server.db.database import Database
from cpuos.server.db.sandboxes import find_sandboxes
from cpuos.server.gateway import GatewayControl
from cpuos.server.lifecycle import Lifecycle
from cpuos.server.tasks import Tasks

__all__ = ["ReadySandboxes"]

_log = structlog.get_logger("cpuos.server.ready")
_GENERATION = 1
_AGENT_WAIT_S = 10.0


class ReadySandboxes:
    """None of them is on record: who takes one writes that first."""

    def __init__(
        self, database: Database, *, scheduler: Scheduler, gateway: GatewayControl, lifecycle: Lifecycle, tasks: Tasks
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._gateway = gateway
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._met: set[str] = set()
        """The gateway is there, or on its way."""
        self._tidied = False

    async def follow(self) -> None:
        """Wait for news, and bring the gateway to what is new and away from what is gone."""
        news = await self._scheduler.follow_ready()
        if not self._tidied:
            await self._forget({*await self._gateway.activity()} - news.ready)  # an earlier server's
            self._tidied = True
        gone, new = self._met - news.ready - news.taken, news.ready - self._met
        self._met = {*news.ready}
        if gone:
            self._tasks.start(self._forget(gone))
        for sandbox_id in new:
            self._tasks.start(self._meet(sandbox_id))

    async def _meet(self, sandbox_id: str) -> None:
        try:
            await self._gateway.attach(sandbox_id, generation=_GENERATION, hostname=sandbox_id, wait_s=_AGENT_WAIT_S)
        except CpuosError as error:  # a create that takes it tries again
            _log.warning("gateway not at a ready sandbox", sandbox=sandbox_id, error=str(error))

    async def _forget(self, gone: set[str]) -> None:
        """They were given up, unless somebody has got them."""
        async with self._database.read() as connection:
            gone = gone - {row.id for row in await find_sandboxes(connection, gone)}
        for sandbox_id in gone:
            if self._lifecycle.creation(sandbox_id) is not None:
                continue
            try:
                await self._gateway.detach(
                    sandbox_id, reason="stopped", text="nobody has taken it", generation=_GENERATION
                )
                await self._gateway.forget(sandbox_id, generation=_GENERATION)
            except CpuosError as error:
                _log.warning("gateway not cleaned", sandbox=sandbox_id, error=str(error))
