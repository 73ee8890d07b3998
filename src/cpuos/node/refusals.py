"""The errors with which a node says no, in the same words from every verb."""

from __future__ import annotations

import errno

from cpuos.errors import CapacityExceeded, Conflict, CpuosError, NotFound, PlatformError
from cpuos.node.images import Manifest
from cpuos.runtimes.base import Runtime

__all__ = ["could_not", "incompatible", "not_ready", "sandbox_not_found", "stale_generation", "stale_policy"]


def sandbox_not_found(sandbox_id: str) -> NotFound:
    return NotFound(f"cannot find sandbox: {sandbox_id}", "this node has no such one", code="sandbox_not_found")


def not_ready(sandbox_id: str) -> Conflict:
    return Conflict(f"cannot create sandbox: {sandbox_id} is not ready", code="sandbox_not_ready")


def stale_generation(sandbox_id: str, *, asked: int, known: int) -> Conflict:
    return Conflict(
        f"cannot use sandbox: {sandbox_id}",
        f"the call is for generation {asked}, the node knows {known}",
        code="stale_generation",
    )


def stale_policy(sandbox_id: str, *, asked: int, known: int) -> Conflict:
    return Conflict(
        f"cannot change the network of sandbox: {sandbox_id}",
        f"the call is for version {asked} of its policy, and version {known} is in force",
        code="stale_policy",
        details={"known": known},
    )


def could_not(verb: str, sandbox_id: str, error: BaseException) -> CpuosError:
    """The error itself where it is of the table, else one that names the verb."""
    if isinstance(error, CpuosError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        why = f"the node's data volume has no room: {error.strerror}"
        return CapacityExceeded(f"cannot {verb} sandbox: {sandbox_id}", why)
    return PlatformError(f"cannot {verb} sandbox: {sandbox_id}", f"{type(error).__name__}: {error}")


def incompatible(what: str, saved: Manifest, *, has_template: bool, runtime: Runtime) -> None:
    """Raise unless processes that were saved so can go on here."""
    why = ""
    if not has_template:
        why = f"this node has no template {saved.template!r} of that build any more, with its processes' programs"
    elif not runtime.takes(saved.runtime_version):
        why = f"it was made by {runtime.name} {saved.runtime_version}, and this node has {runtime.image_version}"
    if why:
        raise Conflict(what, why, code="snapshot_incompatible")
