"""microVMs: one driver, and a thin file for each VMM. QEMU so far, with KVM where it boots, and emulated elsewhere."""

from __future__ import annotations

from typing import Any

__all__ = ["MicrovmRuntime"]


def __getattr__(name: str) -> Any:
    # Lazy: the jail of this package is a program of its own and has no use for the rest.
    if name == "MicrovmRuntime":
        from cpuos.runtimes.microvm.runtime import MicrovmRuntime

        return MicrovmRuntime
    raise AttributeError(name)
