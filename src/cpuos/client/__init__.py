"""The client: everything that user code needs, without the parts of a server. Names load when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuos.client._async.client import AsyncClient
    from cpuos.client._async.job import AsyncJob
    from cpuos.client._async.pack import AsyncDataPack
    from cpuos.client._async.sandbox import AsyncSandbox
    from cpuos.client._async.shell import AsyncShell
    from cpuos.client._async.snapshot import AsyncSnapshot
    from cpuos.client._async.template import AsyncTemplate
    from cpuos.client._stdin import PIPE
    from cpuos.client._sync.client import Client
    from cpuos.client._sync.job import Job
    from cpuos.client._sync.pack import DataPack
    from cpuos.client._sync.sandbox import Sandbox
    from cpuos.client._sync.shell import Shell
    from cpuos.client._sync.snapshot import Snapshot
    from cpuos.client._sync.template import Template
    from cpuos.client._tree import TransferReport
    from cpuos.client.network import Network
    from cpuos.client.result import Result

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
    "DataPack",
    "Job",
    "Network",
    "Result",
    "Sandbox",
    "Shell",
    "Snapshot",
    "Template",
    "TransferReport",
]

_HOMES = {
    "PIPE": "_stdin",
    "AsyncClient": "_async.client",
    "AsyncDataPack": "_async.pack",
    "AsyncJob": "_async.job",
    "AsyncSandbox": "_async.sandbox",
    "AsyncShell": "_async.shell",
    "AsyncSnapshot": "_async.snapshot",
    "AsyncTemplate": "_async.template",
    "Client": "_sync.client",
    "DataPack": "_sync.pack",
    "Job": "_sync.job",
    "Network": "network",
    "Result": "result",
    "Sandbox": "_sync.sandbox",
    "Shell": "_sync.shell",
    "Snapshot": "_sync.snapshot",
    "Template": "_sync.template",
    "TransferReport": "_tree",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
