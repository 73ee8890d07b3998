"""How a command's end becomes an exit code and JSON."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from cpuos.live import size_text

if TYPE_CHECKING:
    from cpuos import Result
    from cpuos.types.command import Command
    from cpuos.types.sandbox import Recreated

__all__ = [
    "OURS",
    "TIMED_OUT",
    "describe_capacity",
    "describe_end",
    "describe_pool",
    "describe_recreated",
    "describe_refusals",
    "describe_result",
    "exit_code_of",
    "room_rows",
]

TIMED_OUT = 124
OURS = 125
SHOWN_REFUSALS = 5


def describe_recreated(recreated: Recreated) -> str:
    """What came back of a sandbox that was lost."""
    workspace = "all of /workspace" if recreated.workspace == "all" else "of /workspace all that was synced"
    if recreated.root_age_s is None:
        return f"{workspace}; all else is as in its template"
    return f"{workspace}; all else as {recreated.root_age_s:.0f} s before it was lost"


def exit_code_of(status: str, *, exit_code: int | None, signal: int | None) -> int:
    """The exit code that tells a shell how the command ended."""
    match status:
        case "exited":
            return exit_code if exit_code is not None else OURS
        case "timed_out":
            return TIMED_OUT
        case "signalled" | "killed" | "oom_killed" | "limited":
            return 128 + (signal or 9)
    return OURS


def describe_end(ended: Result | Command, *, memory_mib: int | None = None) -> str:
    """What an exit code alone does not say, with its numbers; empty where it says everything."""
    after = f" after {round(ended.duration_s, 1):g} s" if ended.duration_s and ended.duration_s >= 0.1 else ""
    match ended.status:
        case "exited":
            return ended.reason
        case "timed_out":
            text = f"the command timed out{after} and was killed with all its children"
        case "signalled":
            text = f"the command was ended by {_signal_name(ended.signal)}{after}"
        case "oom_killed":
            limit = f" of {memory_mib} MiB" if memory_mib else ""
            text = f"the command ran out of the sandbox's memory{limit}{after} ({_signal_name(ended.signal or 9)})"
        case "killed":
            text = f"the command was killed{after}"
        case _:
            text = f"the command ended as {ended.status}{after}"
    return f"{text}: {ended.reason}" if ended.reason else text


def _signal_name(number: int | None) -> str:
    try:
        return f"signal {number} ({signal.Signals(number or 0).name})"
    except ValueError:
        return f"signal {number}"


def describe_capacity(capacity: dict[str, Any]) -> str:
    """The answer of /v1/capacity in one line."""
    return f"promised: {', '.join(f'{used} of at most {most} {name}' for name, used, most, _ in room_rows(capacity))}"


def room_rows(capacity: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The answer of /v1/capacity: of each thing what is promised, the limit of that, and what the machines have."""
    rows = []
    for name, word in {"sandboxes": "sandboxes", "cpu": "CPU", "memory_mib": "memory", "disk_mib": "disk"}.items():
        amount = size_text if name.endswith("_mib") else _number
        used, most, there = (amount(capacity[name][key]) for key in ("reserved", "total", "machine"))
        rows.append((word, used, most, "" if name == "sandboxes" else there))
    return rows


def _number(value: float) -> str:
    return f"{value:g}"


def describe_pool(pool: dict[str, Any]) -> str:
    """The pool of a node, as /v1/nodes tells it, in one line."""
    if not pool["budget_mib"]:
        return "ready: none are started ahead (pool_memory_mib = 0)"
    asked = pool["taken"] + pool["missed"]
    hits = f", taken by {pool['taken']} of {asked} creates" if asked else ""
    return f"ready: {pool['ready']}, {pool['memory_mib']} of {pool['budget_mib']} MiB{hits}"


def describe_result(result: Result) -> dict[str, Any]:
    """A result as `--json` shows it: the field names of the SDK."""
    fields = (
        "command_id",
        "status",
        "exit_code",
        "signal",
        "reason",
        "limit_reached",
        "stdout",
        "stderr",
        "duration_s",
        "truncated",
        "stdout_dropped_bytes",
        "stderr_dropped_bytes",
        "output_path",
        "refused_connections",
    )
    return {name: getattr(result, name) for name in fields}


def describe_refusals(ended: Result | Command) -> list[str]:
    """What network policy refused the command, each destination once, the first few."""
    reasons = list(dict.fromkeys(refused.reason for refused in ended.refused_connections or []))
    more = [f"and {len(reasons) - SHOWN_REFUSALS} more: --json shows them"] if len(reasons) > SHOWN_REFUSALS else []
    return reasons[:SHOWN_REFUSALS] + more
