"""cpuOS: self-hosted computers for AI agents.

from cpuos import Sandbox

with Sandbox.create(template="python") as sbx:
    print(sbx.exec("python --version").stdout)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuos import client, errors, types
    from cpuos.client import (
        PIPE,
        AsyncClient,
        AsyncDataPack,
        AsyncJob,
        AsyncSandbox,
        AsyncShell,
        AsyncSnapshot,
        AsyncTemplate,
        Client,
        DataPack,
        Job,
        Network,
        Result,
        Sandbox,
        Shell,
        Snapshot,
        Template,
        TransferReport,
    )
    from cpuos.errors import CommandFailed, CpuosError

__version__ = "0.1.0"

__all__ = [
    "PIPE",
    "AsyncClient",
    "AsyncDataPack",
    "AsyncJob",
    "AsyncSandbox",
    "AsyncShell",
    "AsyncSnapshot",
    "AsyncTemplate",
    "Client",
    "CommandFailed",
    "CpuosError",
    "DataPack",
    "Job",
    "Network",
    "Result",
    "Sandbox",
    "Shell",
    "Snapshot",
    "Template",
    "TransferReport",
    "client",
    "errors",
    "types",
]

_MODULES = frozenset({"client", "errors", "types"})
_ERRORS = frozenset({"CommandFailed", "CpuosError"})


def __getattr__(name: str) -> Any:
    """Names load when they are first used: `import cpuos` itself takes no time."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _ERRORS:
        return getattr(import_module(f"{__name__}.errors"), name)
    if name in __all__:
        return getattr(import_module(f"{__name__}.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
