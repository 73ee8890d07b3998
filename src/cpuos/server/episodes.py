"""One alarm of one sandbox, from its begin to its end: how it is kept on record, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cpuos.types.alarms import ActiveAlarm, AlarmMeasure, AlarmOrigin, AlarmRule

__all__ = ["Episode", "Seen", "describe"]

_UNITS = {AlarmMeasure.CPU: "cpu_seconds", AlarmMeasure.SENT: "sent_bytes", AlarmMeasure.CONNECTIONS: "connections"}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one look found of one rule."""

    used: float
    """Within its window."""
    limit: float
    """In the same unit: seconds, bytes, a number."""
    total: float
    """Of the sandbox, ever."""
    is_whole: bool
    """All of the window is known."""

    @property
    def is_over(self) -> bool:
        return self.used >= self.limit


class Episode(ActiveAlarm):
    """As it is on record with the sandbox."""

    generation: int
    used: float
    """Within the window in which it began."""
    total: float
    """Of the sandbox then."""

    @property
    def key(self) -> tuple[AlarmOrigin, str]:
        """A sandbox has at most one with it."""
        return self.origin, self.rule.text

    def kept(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def told_at_begin(self, *, cpu: int) -> dict[str, Any]:
        """For the audit."""
        return {
            "what": describe(self.rule, self.used, cpu=cpu),
            "rule": self.rule.text,
            "origin": self.origin,
            "action": self.rule.action.value,
        }

    def told_at_end(self, *, why: str, now: datetime, total: float | None) -> dict[str, Any]:
        """For the audit. `total`: of the sandbox now, as far as it is known; a count that went back began anew."""
        detail = {"why": why, "rule": self.rule.text, "origin": self.origin}
        detail["lasted_s"] = round((now - self.since).total_seconds(), 1)
        if total is not None:
            since = total - self.total if total >= self.total else total
            detail[_UNITS[self.rule.measure]] = round(self.used + since, 3)
        return detail


def describe(rule: AlarmRule, used: float, *, cpu: int) -> str:
    """What was used within the rule's window, for people."""
    within = f"within {rule.text.partition('/')[2].partition(':')[0]}"
    if rule.measure is AlarmMeasure.CPU:
        share = used / (cpu * rule.window_s)
        return f"it used {share:.0%} of its {cpu} CPU{'s' if cpu > 1 else ''} {within}"
    if rule.measure is AlarmMeasure.SENT:
        return f"it sent {used / (1 << 20):,.1f} MiB {within}"
    return f"it opened {used:,.0f} connections {within}"
