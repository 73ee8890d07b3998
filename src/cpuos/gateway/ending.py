"""How a command ends: the agent's word or a fact from outside, journaled, told, saved, in this order, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import structlog

from cpuos.errors import CpuosError
from cpuos.gateway.agent.answers import Ended
from cpuos.gateway.journal import Journal
from cpuos.gateway.reached import ReachedLimits
from cpuos.gateway.records import STREAMS, RecordedCommand
from cpuos.gateway.refusals import Refusals
from cpuos.types.command import CommandStatus
from cpuos.types.limits import SandboxLimit

__all__ = ["SIGKILL", "CommandEnding"]

OOM_WAIT_S = 0.5
"""An unexplained SIGKILL is told only after this: the word from outside that memory ran out comes beside it."""
OOM_NEAR_S = 5.0
SAVE_SOON_S = 0.001
"""After those who wait for the end were woken."""
SAVE_RETRY_S = 1.0
REFUSALS_AFTER_S = 0.05
"""A command that exits with code 0 before this is not asked what it was refused: that would cost more than it ran."""
SIGKILL = 9
_EXPLAINED = {CommandStatus.EXITED, CommandStatus.SIGNALLED}
"""What else ended it has words of its own."""
SIGKILL_WORDS = {SIGKILL, 128 + SIGKILL}
"""The signal, and the exit code of a shell whose program it ended."""

log = structlog.get_logger("gateway.ending")


class CommandEnding:
    """`on_told` is called when the end is in the journal, `on_saved` when the record is written too.

    Whatever of it a crash prevents, the next process does: the agent keeps the end until the record is saved.
    """

    def __init__(
        self,
        recorded: RecordedCommand,
        *,
        journal: Journal,
        refusals: Refusals | None,
        reached: ReachedLimits,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_told: Callable[[], None],
        on_saved: Callable[[], None],
        journaled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorded = recorded
        self._journal = journal
        self._refusals = refusals
        self._reached = reached
        self._spawn = spawn
        self._on_told = on_told
        self._on_saved = on_saved
        self._journaled = journaled
        """The outcome is in the journal already: an earlier process died before it saved the record."""
        self._clock = clock
        self._word: Ended | None = None
        self._oom_at: float | None = None
        self._lost_a_process = False
        self._saved = False
        self.decided = False
        """The end stands, though it may not be told yet."""

    @property
    def heard(self) -> bool:
        """The agent has told an end, or it was decided otherwise."""
        return self.decided or self._word is not None

    def take_word(self, word: Ended) -> None:
        """The agent's ENDED. Its counts are only compared: the record has its own."""
        self._word = word
        for name in STREAMS:
            told, held = getattr(word, f"{name}_bytes"), self._recorded.streams[name].total
            if told != held:
                log.warning("output.count", command=self._recorded.id, stream=name, told=told, held=held)
        unexplained = word.status in ("signalled", "exited") and SIGKILL_WORDS & {word.signal, word.exit_code}
        if unexplained and self._oom_at is None and word.met is None:
            asyncio.get_running_loop().call_later(OOM_WAIT_S, self._look_and_settle, word)
        else:
            self._look_and_settle(word)

    def _look_and_settle(self, word: Ended) -> None:
        quick = word.exit_code == 0 and word.duration_s < REFUSALS_AFTER_S
        refusals = None if quick else self._refusals
        ask = word.exit_code != 0 or self._oom_at is not None or word.met is not None
        if self.decided or not (refusals is not None or ask or self._reached.worth_a_look):
            self.settle()
        else:
            self._spawn(self._look(refusals, ask=ask))

    async def _look(self, refusals: Refusals | None, *, ask: bool) -> None:
        """Ask what was refused and which limit was met, for at most half a second, then go on with the end."""
        await asyncio.gather(self._look_refused(refusals), self._reached.look(ask=ask))
        self.settle()

    async def _look_refused(self, refusals: Refusals | None) -> None:
        command = self._recorded.record.command
        if refusals is not None:
            refused = await refusals.since(command.sandbox, command.started_at)
            if not self.decided:
                self._recorded.update(refused_connections=refused)

    def memory_ran_out(self, *, own: bool) -> None:
        """Told from outside: memory ran out, and a process was killed; `own`: surely one of this command."""
        self._oom_at = self._clock()
        self._lost_a_process |= own

    def settle(self) -> None:
        """Decide by the agent's word, where there is one."""
        word = self._word
        if word is None:
            return
        fields: dict[str, Any] = {
            "duration_s": round(min(word.duration_s, self.age_s() + 0.1), 6),
            "output_path": self._output_path(word.output_path),
        }
        near = self._oom_at is not None and self._clock() - self._oom_at <= OOM_NEAR_S
        by_guest = word.met == SandboxLimit.MEMORY and word.status in ("signalled", "exited")
        lost_a_process = self._lost_a_process or by_guest
        ended_by_memory = (near or by_guest) and bool(SIGKILL_WORDS & {word.signal, word.exit_code})
        status = CommandStatus.OOM_KILLED if ended_by_memory else CommandStatus(word.status)
        fields["limit_reached"] = self._reached.told(
            status, exit_code=word.exit_code, out_of_memory=ended_by_memory or lost_a_process, met=word.met
        )
        if ended_by_memory:
            self.decide(status, signal=SIGKILL, reason="the sandbox ran out of memory", **fields)
        else:
            reason = word.reason
            if lost_a_process and not reason:
                reason = "the sandbox ran out of memory, and a process of the command was killed"
            if word.exit_code != 0 and status in _EXPLAINED and fields["limit_reached"] is not None and not reason:
                reason = fields["limit_reached"].reason
            fields |= {"exit_code": word.exit_code, "signal": word.signal, "limit": word.limit, "reason": reason}
            self.decide(status, **fields)

    def decide(self, status: CommandStatus, **fields: Any) -> None:
        """The one way to the end; the first caller wins."""
        if self.decided:
            return
        self.decided = True
        self._record(status, {"duration_s": round(self.age_s(), 6), **fields})

    def save(self) -> None:
        """Save the record of an end that was told; repeated until it is done."""
        if self._saved or not self._recorded.ended:
            return
        try:
            self._recorded.save()
        except OSError as error:
            log.error("record.not_saved", command=self._recorded.id, error=str(error))
            asyncio.get_running_loop().call_later(SAVE_RETRY_S, self.save)
            return
        self._saved = True
        self._on_saved()

    def age_s(self) -> float:
        """Seconds since the start, also over a restart of the gateway."""
        return max(0.0, (datetime.now(UTC) - self._recorded.record.command.started_at).total_seconds())

    def _record(self, status: CommandStatus, fields: dict[str, Any]) -> None:
        before = self._recorded.record
        self._recorded.update(status=status, ended_at=datetime.now(UTC), **fields)
        try:
            self._write_outcome()
        except CpuosError as error:
            self._recorded.record = before
            log.error("outcome.not_recorded", command=self._recorded.id, error=str(error))
            asyncio.get_running_loop().call_later(SAVE_RETRY_S, self._record, status, fields)
            return
        self._on_told()
        self._recorded.notify()
        asyncio.get_running_loop().call_later(SAVE_SOON_S, self.save)

    def _write_outcome(self) -> None:
        if self._journaled:
            return
        record = self._recorded.record
        told = ("exit_code", "signal", "reason", "duration_s", "stdout_bytes", "stderr_bytes")
        self._journal.outcome(
            record.intent,
            record.ticket,
            "command.start",
            target=self._recorded.id,
            result="unknown" if record.command.status is CommandStatus.UNKNOWN else "ok",
            detail={"status": record.command.status.value, **{name: getattr(record.command, name) for name in told}},
        )
        self._journaled = True
        if record.command.limit_reached is not None:
            detail = record.command.limit_reached.model_dump(mode="json") | {"command": self._recorded.id}
            self._journal.note(record.command.sandbox, "limit.reached", target=record.command.sandbox, detail=detail)

    def _output_path(self, told: str | None) -> str | None:
        """The guest's word only where it is the one path it may be."""
        expected = f"/var/log/cpuos/commands/{self._recorded.id}"
        return expected if (told or "").rstrip("/") == expected else None
