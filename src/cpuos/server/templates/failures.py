"""Errors of builds: which step, and the end of what it wrote."""

from __future__ import annotations

from cpuos.errors import CpuosError, InvalidRequest, LimitReached
from cpuos.server.templates.guest import Guest
from cpuos.server.templates.recipe import TOO_LARGE_EXIT
from cpuos.types.command import Command
from cpuos.types.template import Build

__all__ = [
    "build_failed",
    "is_of_recipe",
    "other_failed",
    "output_end",
    "step_failed",
    "too_large",
    "took_too_long",
    "was_cancelled",
]

_OUTPUT_END = 2000
# What these see is not in the recipe: what the caller uploads, what a registry has and whom it serves.
_FROM_OUTSIDE = ("files", "fetch")


async def step_failed(guest: Guest, command: Command, *, build: Build, step: str) -> CpuosError:
    tail = await output_end(guest, command.id)
    if step in ("pack", "unpack") and command.exit_code == TOO_LARGE_EXIT:
        return too_large(build, tail.strip()[-300:])
    how = f"exit code {command.exit_code}" if command.exit_code is not None else command.status.value
    why = f"{command.reason or how}; the end of its output: {tail}" if tail else command.reason or how
    error = build_failed(build, step, why, output=tail)
    if command.exit_code is not None:
        error.details["exit_code"] = command.exit_code
    return error


def is_of_recipe(error: CpuosError) -> bool:
    """The same steps in a sandbox of the same size would fail in the same way: a command of theirs has ended with an
    error, or what they have made is too large."""
    details = error.details
    ended = "exit_code" in details and details.get("step") not in _FROM_OUTSIDE
    return ended or details.get("limit") in ("template_size", "templates_size")


async def output_end(guest: Guest, command_id: str) -> str:
    """The end of what a command wrote, its control characters replaced."""
    ends = [await guest.output_end(command_id, stream=stream, limit=_OUTPUT_END) for stream in ("stdout", "stderr")]
    text = "\n".join(end.decode(errors="replace").strip() for end in ends if end.strip())
    return _printable(text)[-_OUTPUT_END:]


def build_failed(build: Build, step: str, why: str, *, output: str = "") -> InvalidRequest:
    shown = next((shown for shown in build.steps if shown.name == step), None)
    text = shown.text if shown is not None else ""
    return InvalidRequest(
        f"cannot build template {build.name!r}: step {step!r} failed ({_printable(text)})",
        why,
        code="build_failed",
        hint=f"cpuos logs {build.sandbox} {shown.command}" if shown is not None and shown.command else "",
        details={"step": step, "output": output},
    )


def other_failed(build: Build, other: Build) -> InvalidRequest:
    """It waited for an equal build."""
    error = other.error
    why = "it is not there any more" if error is None else f"{error.what}: {error.why}"
    return InvalidRequest(
        f"cannot build template {build.name!r}: the equal build {other.id}, which it waited for, failed",
        why,
        code="build_failed",
        hint=(error.hint if error else "") or "repeat the build",
        details={} if error is None else error.details,
    )


def too_large(build: Build, why: str) -> LimitReached:
    return LimitReached(
        f"cannot build template {build.name!r}: its image would be too large",
        why,
        hint="remove what the steps leave behind, or ask the operator for a higher template_max_mib",
        details={"limit": "template_size"},
    )


def took_too_long(build: Build, step: str, *, limit_s: float) -> LimitReached:
    return LimitReached(
        f"cannot build template {build.name!r}: it took longer than {limit_s:g} s",
        f"its time ended in step {step!r}",
        hint="a longer timeout, or fewer steps",
        details={"limit": "build_time", "step": step},
    )


def was_cancelled(build: Build, step: str, *, by: str) -> InvalidRequest:
    return InvalidRequest(
        f"cannot build template {build.name!r}: it was cancelled",
        f"by {by}, in step {step!r}",
        code="build_failed",
        details={"step": step},
    )


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
