"""A sandbox that stands still: what is kept of it, and how calls wait until it goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from cpuos.errors import AgentFailure, CpuosError, Unavailable
from cpuos.gateway.activity import Wakes

__all__ = ["Gate", "Suspension"]

WAKE_WAIT_S = 30.0
"""A call for a suspended sandbox waits so long for its resume."""
MAX_WAITING = 512
"""Calls of one sandbox that wait; more are refused at once."""
REATTACH_WAIT_S = 10.0
"""A call for a sandbox that a restarted gateway has not reached yet waits so long."""


@dataclass(frozen=True, kw_only=True)
class Suspension:
    """As it is saved: it lasts over a restart of the gateway."""

    freeze: str
    since: float
    """Unix seconds."""
    auto_resume: bool
    told: dict[str, Any]
    """What the agent said of itself, checked: for a repeat of the call."""

    def to_facts(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: dict[str, Any] | None) -> Suspension | None:
        return None if facts is None else cls(**facts)


class Gate:
    """Calls come through to a sandbox's agent while it is open. One is made shut."""

    def __init__(self, sandbox_id: str, *, wakes: Wakes, clock: Callable[[], float] = time.time) -> None:
        self._sandbox_id = sandbox_id
        self._wakes = wakes
        self._clock = clock
        self._news = asyncio.Event()
        self._waiting = 0
        self.open = False
        self.suspending = False
        self.suspension: Suspension | None = None
        self.halted = False
        """Its node holds it: the volume is full. It is told anew every few seconds."""
        self.stood_s = 0.0
        """Seconds for which the sandbox has stood still, in all."""

    @property
    def paused(self) -> bool:
        """It stands still, or is about to."""
        return self.suspending or self.suspension is not None

    def shut(self, *, suspending: bool = False) -> None:
        self.open, self.suspending = False, suspending

    def reopen(self) -> None:
        """Let all through: the agent is there again, or the sandbox has ended."""
        if self.suspension is not None:
            self.stood_s += max(0.0, self._clock() - self.suspension.since)
        self.open, self.suspending, self.suspension = True, False, None
        self._wakes.forget(self._sandbox_id)
        self._tell()

    def suspend(self, freeze: str, told: dict[str, Any], *, auto_resume: bool) -> None:
        """It stands still. Whoever came meanwhile calls it."""
        self.suspending = False
        self.suspension = Suspension(freeze=freeze, since=self._clock(), auto_resume=auto_resume, told=told)
        self._tell()

    def check_halted(self) -> None:
        """Raise where a call would find nobody to answer it."""
        if self.halted:
            raise self._stands_still()

    def _stands_still(self) -> CpuosError:
        return Unavailable(
            f"cannot use sandbox {self._sandbox_id}: it stands still",
            "its node's data volume is full; it goes on by itself when there is room",
            code="volume_full",
        )

    async def wait(self) -> None:
        """Return when the gate is open; each caller of a suspended sandbox is told to those who can resume it."""
        if self.paused and self._waiting >= MAX_WAITING:
            raise self.refusal()
        called = None
        self._waiting += 1
        try:
            async with asyncio.timeout(WAKE_WAIT_S if self.paused else REATTACH_WAIT_S):
                while not self.open:
                    if self.suspension is not None and self.suspension is not called:
                        if not self.suspension.auto_resume:
                            raise self.refusal()
                        called = self.suspension
                        self._wakes.call(self._sandbox_id)
                    await self._news.wait()
        except TimeoutError:
            if self.paused:
                raise self.refusal() from None
            raise AgentFailure(
                f"cannot reach sandbox {self._sandbox_id}",
                f"its agent did not answer for {REATTACH_WAIT_S:g} s",
                code="agent_unresponsive",
            ) from None
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._wakes.forget(self._sandbox_id)

    def refusal(self) -> CpuosError:
        """For a call that does not wait, or has waited in vain."""
        return Unavailable(
            f"cannot use sandbox {self._sandbox_id}: it is paused",
            code="sandbox_paused",
            hint=f"cpuos resume {self._sandbox_id}",
            details={"auto_resume": self.suspension is None or self.suspension.auto_resume},
        )

    def explain(self, error: CpuosError) -> CpuosError:
        """A call that was cut because the sandbox was paused, or that nobody answers since it stands still, says so."""
        if self.halted and isinstance(error, AgentFailure):
            return self._stands_still()
        return self.refusal() if self.paused and isinstance(error, AgentFailure) else error

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
