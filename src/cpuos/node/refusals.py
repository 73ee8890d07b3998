"""The errors with which a node says no, in the same words from every verb."""

from __future__ import annotations

from cpuos.errors import Conflict, CpuosError, NotFound, PlatformError

__all__ = ["could_not", "sandbox_not_found", "stale_generation"]


def sandbox_not_found(sandbox_id: str) -> NotFound:
    return NotFound(f"cannot find sandbox: {sandbox_id}", "this node has no such one", code="sandbox_not_found")


def stale_generation(sandbox_id: str, *, asked: int, known: int) -> Conflict:
    return Conflict(
        f"cannot use sandbox: {sandbox_id}",
        f"the call is for generation {asked}, the node knows {known}",
        code="stale_generation",
    )


def could_not(verb: str, sandbox_id: str, error: BaseException) -> CpuosError:
    """The error itself where it is of the table, else one that names the verb."""
    if isinstance(error, CpuosError):
        return error
    return PlatformError(f"cannot {verb} sandbox: {sandbox_id}", f"{type(error).__name__}: {error}")
