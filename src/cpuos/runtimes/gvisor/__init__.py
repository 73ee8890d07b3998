"""gVisor: the default runtime where KVM does not boot. One runsc sandbox each, systrap platform."""

from __future__ import annotations

from typing import Any

__all__ = ["GvisorRuntime"]


def __getattr__(name: str) -> Any:
    # Lazy: the victim worker lives in this package and has no use for the rest.
    if name == "GvisorRuntime":
        from cpuos.runtimes.gvisor.runtime import GvisorRuntime

        return GvisorRuntime
    raise AttributeError(name)
