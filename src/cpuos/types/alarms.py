"""Alarms: what a sandbox may use for a while before somebody hears of it, and what is done then."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from cpuos.errors import InvalidRequest
from cpuos.types.base import Answer, Request
from cpuos.types.units import parse_duration_s, parse_size_bytes

__all__ = [
    "MAX_ALARMS",
    "ActiveAlarm",
    "AlarmAction",
    "AlarmMeasure",
    "AlarmOrigin",
    "AlarmRule",
    "AlarmUpdate",
    "WorkspaceAlarms",
    "parse_alarms",
]

MAX_ALARMS = 16

AlarmOrigin = Literal["installation", "workspace", "sandbox"]
_RULE = re.compile(r"([a-z]+)=([^/\s:]+)/([^/\s:]+)(?::([a-z]+))?")
_FORM = "it is written MEASURE=LIMIT/WINDOW or MEASURE=LIMIT/WINDOW:ACTION, such as cpu=90%/10m or sent=5GiB/1h:pause"
_BOUNDS = {"cpu": (0.01, 1.0), "sent": (1024.0, float(1 << 50)), "connections": (1.0, 1e12)}
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SPANS = ((86400, "d"), (3600, "h"), (60, "m"))


class AlarmMeasure(StrEnum):
    """Measured from outside of the sandbox."""

    CPU = "cpu"
    """Processor time of all its processes, as a share of its `cpu`."""
    SENT = "sent"
    """Bytes that left it for the outside."""
    CONNECTIONS = "connections"
    """Connections to the outside that it opened."""


class AlarmAction(StrEnum):
    AUDIT = "audit"
    """It is told, and nothing else."""
    PAUSE = "pause"
    """It is paused until somebody resumes it; calls and visits do not."""
    KILL = "kill"


class AlarmRule(Request):
    """One limit. In requests it may be written as a text: `cpu=90%/10m`, `sent=5GiB/1h:pause`,
    `connections=10000/10m:kill`."""

    measure: AlarmMeasure
    limit: float = Field(gt=0, allow_inf_nan=False)
    """Of cpu a share, up to 1; of sent bytes; of connections a number."""
    window_s: float = Field(ge=5, le=86400)
    """So much time of its own, while it runs: the alarm is when it uses the limit, or more, within it."""
    action: AlarmAction = AlarmAction.AUDIT

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        return _fields_of(value) if isinstance(value, str) else value

    @field_validator("limit")
    @classmethod
    def _limit_fits(cls, value: float, info: ValidationInfo) -> float:
        measure = info.data.get("measure")
        if measure is None:
            return value  # that is an error of its own
        rounded = round(value, 4) if measure is AlarmMeasure.CPU else float(round(value))
        least, most = _BOUNDS[measure]
        if not least <= rounded <= most:
            raise ValueError(f"it is {_shown(measure, least)} to {_shown(measure, most)}")
        return rounded

    @field_validator("window_s")
    @classmethod
    def _whole_seconds(cls, value: float) -> float:
        return float(round(value))

    @property
    def text(self) -> str:
        """The short form: equal texts, equal rules."""
        told = "" if self.action is AlarmAction.AUDIT else f":{self.action}"
        return f"{self.measure}={_shown(self.measure, self.limit)}/{_span(self.window_s)}{told}"


class ActiveAlarm(Answer):
    """A sandbox uses this much since then."""

    origin: AlarmOrigin
    """Whose rule it is."""
    rule: AlarmRule
    since: datetime


class AlarmUpdate(Request):
    """The rules that take the place of those before; none: only the installation's hold."""

    rules: list[AlarmRule] = Field(max_length=MAX_ALARMS)


class WorkspaceAlarms(Answer):
    """What holds for every sandbox of a workspace, beside the sandbox's own rules. Each rule holds by itself."""

    rules: list[AlarmRule]
    installation: list[AlarmRule]
    """Set by the operator for all workspaces."""


def parse_alarms(texts: Iterable[str]) -> tuple[AlarmRule, ...]:
    """The rules of a setting."""
    rules = []
    for text in texts:
        try:
            rules.append(AlarmRule.model_validate(text))
        except ValidationError as error:
            why = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise InvalidRequest(f"cannot read alarms: {text!r}", why, hint='alarms = ["cpu=90%/10m"]') from error
    return tuple(rules)


def _fields_of(text: str) -> dict[str, Any]:
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r:.100} is no rule of an alarm: {_FORM}")
    measure, limit, window, action = match.groups()
    if measure not in set(AlarmMeasure):
        raise ValueError(f"{measure!r} is nothing that is measured: it is {', '.join(AlarmMeasure)}")
    fields: dict[str, Any] = {"measure": measure}
    try:
        fields["window_s"] = parse_duration_s(window)
        fields["limit"] = _limit_of(measure, limit)
    except (InvalidRequest, ValueError):
        raise ValueError(f"{text!r:.100} is no rule of an alarm: {_FORM}") from None
    return fields if action is None else {**fields, "action": action}


def _limit_of(measure: str, text: str) -> float:
    if measure == AlarmMeasure.SENT:
        return float(parse_size_bytes(text))
    if measure == AlarmMeasure.CPU:
        if not text.endswith("%"):
            raise ValueError("a share is written in percent")
        return float(text[:-1]) / 100
    return float(text)


def _shown(measure: AlarmMeasure | str, limit: float) -> str:
    if measure == AlarmMeasure.CPU:
        return f"{limit * 100:.6g}%"
    if measure == AlarmMeasure.CONNECTIONS:
        return str(int(limit))
    for size, unit in _SIZES:
        if limit % size == 0:
            return f"{limit / size:.0f}{unit}"
    return str(int(limit))


def _span(seconds: float) -> str:
    for length, unit in _SPANS:
        if seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
