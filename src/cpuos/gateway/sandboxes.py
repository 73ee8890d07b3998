"""All of this gateway's sandboxes, found again after a restart."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import structlog

from cpuos.errors import AgentFailure, CpuosError, InvalidRequest, NotFound
from cpuos.gateway.activity import Wakes
from cpuos.gateway.agent.answers import Hello
from cpuos.gateway.agent.connection import AgentTimes
from cpuos.gateway.agent.sockets import Dialler
from cpuos.gateway.journal import Journal
from cpuos.gateway.limits import GatewayLimits
from cpuos.gateway.reached import LimitReader
from cpuos.gateway.refusals import Refusals
from cpuos.gateway.sandbox import GatewaySandbox
from cpuos.gateway.spool import SpoolLimits
from cpuos.gateway.store import CommandStore
from cpuos.types.command import CommandStatus
from cpuos.types.limits import ReachedLimit

__all__ = ["Sandboxes"]

LOOK_EVERY_S = 2.0

log = structlog.get_logger("gateway.sandboxes")


class Sandboxes:
    """All of this gateway's sandboxes: `open` takes up what an earlier process left, `aclose` leaves it to the next."""

    def __init__(
        self,
        folder: Path,
        *,
        journal: Journal,
        dialler: Dialler,
        refusals: Refusals | None,
        limit_reader: LimitReader | None,
        limits: GatewayLimits,
        spool_limits: SpoolLimits,
        times: AgentTimes,
    ) -> None:
        self._folder = folder
        self._journal = journal
        self._dialler = dialler
        self._refusals = refusals
        self._limit_reader = limit_reader
        self._limits = limits
        self._spool_limits = spool_limits
        self._times = times
        self.wakes = Wakes()
        self._sandboxes: dict[str, GatewaySandbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Read the disk and start attaching; returns at once."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = [self._make(path.name) for path in sorted(self._folder.iterdir())]
        living = {recorded.record.intent for sandbox in found for recorded in sandbox.store.running.values()}
        settled = self._journal.settle_interrupted(living=living)
        for sandbox in found:
            sandbox.restore(sandbox.store.facts(), settled=settled)
            if sandbox.generation and sandbox.ended is None:
                if not sandbox.gate.paused:  # else the server has it attached once it is resumed
                    self._spawn(self._attach_again(sandbox))
            elif sandbox.ended is not None and sandbox.store.running:
                await sandbox.end(*sandbox.ended)
        self._spawn(self._watch())

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sandbox in self._sandboxes.values():
            await sandbox.leave()

    def find(self, sandbox_id: str) -> GatewaySandbox | None:
        """Also one that was never attached."""
        return self._sandboxes.get(sandbox_id)

    def get(self, sandbox_id: str) -> GatewaySandbox:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or not sandbox.generation:
            raise NotFound(
                f"cannot find sandbox {sandbox_id[:64]}", "the gateway has not attached to it", code="sandbox_not_found"
            )
        return sandbox

    async def attach(
        self,
        sandbox_id: str,
        generation: int,
        *,
        hostname: str,
        wait_s: float,
        starting_s: float = 0.0,
        incomplete: bool = False,
    ) -> Hello:
        if generation < 1:
            raise InvalidRequest(f"cannot attach generation {generation}", "generations start at 1")
        sandbox = self._sandboxes.get(sandbox_id) or self._make(sandbox_id)
        return await sandbox.attach(
            generation, hostname=hostname, wait_s=wait_s, starting_s=starting_s, incomplete=incomplete
        )

    async def suspend(
        self, sandbox_id: str, freeze: str, *, if_idle_since: float | None, auto_resume: bool
    ) -> dict[str, Any]:
        """Where it cannot be known whether the sandbox stands still, it is attached again, which makes it go on."""
        sandbox = self.get(sandbox_id)
        try:
            return await sandbox.suspend(freeze, if_idle_since=if_idle_since, auto_resume=auto_resume)
        except AgentFailure:
            self._spawn(self._attach_again(sandbox))
            raise

    def activity(self) -> dict[str, dict[str, Any]]:
        """Of all that live."""
        return {
            sandbox.id: {
                "busy": sandbox.activity.busy or not (sandbox.gate.open or sandbox.gate.paused),
                "idle_since": sandbox.idle_since,
                "suspended": sandbox.gate.suspension is not None,
            }
            for sandbox in self._sandboxes.values()
            if sandbox.generation and sandbox.ended is None
        }

    async def detach(
        self,
        sandbox_id: str,
        status: CommandStatus,
        reason: str,
        *,
        generation: int | None = None,
        limit: ReachedLimit | None = None,
    ) -> None:
        """Nothing there is fine; with `generation`, so is a later one, which stays."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None and not sandbox.is_after(generation):
            await sandbox.detach(status, reason, limit=limit)

    async def forget(self, sandbox_id: str, *, generation: int | None = None) -> None:
        """Remove the record of an ended sandbox, output and all. Nothing there is fine; with `generation`, so is a
        later one, which stays."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.is_after(generation):
            return
        await sandbox.detach(CommandStatus.KILLED, "its record was removed")
        self._sandboxes.pop(sandbox_id, None)
        if self._refusals is not None:
            self._refusals.forget(sandbox_id)
        await asyncio.to_thread(shutil.rmtree, self._folder / sandbox_id, True)

    def _make(self, sandbox_id: str) -> GatewaySandbox:
        store = CommandStore(self._folder / sandbox_id, limits=self._spool_limits)
        sandbox = GatewaySandbox(
            sandbox_id,
            store=store,
            journal=self._journal,
            dialler=self._dialler,
            refusals=self._refusals,
            limit_reader=self._limit_reader,
            limits=self._limits,
            times=self._times,
            wakes=self.wakes,
        )
        self._sandboxes[sandbox_id] = sandbox
        return sandbox

    async def _attach_again(self, sandbox: GatewaySandbox) -> None:
        delay = 0.05
        while sandbox.ended is None and not sandbox.gate.paused and not sandbox.gate.open:
            try:
                await sandbox.attach(sandbox.generation, hostname=sandbox.hostname, wait_s=5.0)
                return
            except CpuosError as error:
                log.warning("sandbox.attach_failed", sandbox=sandbox.id, error=str(error))
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for sandbox in list(self._sandboxes.values()):
                sandbox.look()
            self.bound_ended()

    def bound_ended(self) -> None:
        """Keep the output of ended sandboxes within its limit: that of the one that ended first goes first."""
        ended = [sandbox for sandbox in self._sandboxes.values() if sandbox.ended is not None and sandbox.store.stored]
        over = sum(sandbox.store.stored for sandbox in ended) - self._spool_limits.ended_bytes
        if over <= 0:
            return
        for sandbox in sorted(ended, key=lambda one: one.store.facts_written_at()):
            over -= sandbox.store.stored
            sandbox.store.drop_outputs()
            log.info("sandbox.outputs_dropped", sandbox=sandbox.id)
            if over <= 0:
                return

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
