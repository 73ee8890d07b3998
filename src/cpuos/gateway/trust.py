"""How long a command's stream is tried again when the agent fails it, and when nobody can know any more."""

from __future__ import annotations

from cpuos.errors import CpuosError

__all__ = ["StreamTrust"]

MAX_VIOLATIONS = 5
"""Answers or frames outside the contract, in all."""
MAX_SILENCES = 5
"""Streams in a row on which not even a KEEPALIVE came."""
MAX_FRUITLESS = 10
"""Streams in a row that the agent accepts and cuts before anything new."""
RETRY_S = (0.02, 0.1, 0.3, 1.0, 2.0)


class StreamTrust:
    """Counters. An agent that cannot be reached is tried for ever: the node tells when the sandbox is gone."""

    def __init__(self) -> None:
        self._attempts = 0
        self._violations = 0
        self._silences = 0
        self._fruitless = 0
        self._why = ""

    def next_delay_s(self) -> float:
        """Before another attempt."""
        delay = RETRY_S[min(self._attempts, len(RETRY_S) - 1)]
        self._attempts += 1
        return delay

    def took_output(self) -> None:
        """New output came, or could have: this side had no room for it."""
        self._attempts = self._fruitless = self._silences = 0

    def took_sign(self) -> None:
        """A stream began."""
        self._attempts = min(self._attempts, 1)

    def took_keepalive(self) -> None:
        self._fruitless = self._silences = 0

    def was_refused(self, error: CpuosError) -> None:
        """An attempt to attach failed."""
        if error.code == "agent_invalid":
            self._violations += 1
            self._why = error.why

    def was_cut(self, error: CpuosError | None) -> None:
        """A stream that stood is gone."""
        self._fruitless += 1
        if error is not None:
            self.was_refused(error)

    def was_silent(self) -> None:
        self._silences += 1

    @property
    def lost(self) -> str | None:
        """Why there is no use in trying again; None while there is."""
        if self._violations >= MAX_VIOLATIONS:
            return f"the agent broke its contract: {self._why}"
        if self._silences >= MAX_SILENCES:
            return "the agent has fallen silent"
        if self._fruitless >= MAX_FRUITLESS:
            return f"the agent cut its stream {self._fruitless} times in a row"
        return None
