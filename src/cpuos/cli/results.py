"""How a command's end becomes an exit code and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuos import Result

__all__ = ["OURS", "TIMED_OUT", "describe_result", "exit_code_of"]

TIMED_OUT = 124
OURS = 125


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


def describe_result(result: Result) -> dict[str, Any]:
    """A result as `--json` shows it: the field names of the SDK."""
    fields = (
        "command_id",
        "status",
        "exit_code",
        "signal",
        "reason",
        "stdout",
        "stderr",
        "duration_s",
        "truncated",
        "stdout_dropped_bytes",
        "stderr_dropped_bytes",
        "output_path",
    )
    return {name: getattr(result, name) for name in fields}
