"""What a node tells the server: facts, never states."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from cpuos.types.base import Answer, Request
from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy, PolicyLayer
from cpuos.types.sandbox import SANDBOX_ID_PATTERN, Isolation

__all__ = [
    "NodeFacts",
    "NodeNetworkUpdate",
    "NodeSandboxCreate",
    "RuntimeFacts",
    "SandboxFacts",
    "SandboxStats",
    "TemplateFacts",
]

SandboxId = Annotated[str, StringConstraints(pattern=SANDBOX_ID_PATTERN)]


def _nothing() -> EffectivePolicy:
    off = PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))
    return EffectivePolicy(version=1, layers=[off])


class NodeSandboxCreate(Request):
    """Ids and numbers only: no path, argument or flag crosses this line."""

    id: SandboxId
    generation: int = Field(ge=1)
    template: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    runtime: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,16}$")]
    hostname: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    cpu: int = Field(ge=1, le=64)
    memory_mib: int = Field(ge=128, le=1 << 20)
    disk_mib: int = Field(ge=64, le=1 << 22)
    max_processes: int = Field(ge=16, le=32768)
    network: EffectivePolicy = Field(default_factory=_nothing)
    """In place before the first instruction of the guest; who says nothing gets nothing."""


class NodeNetworkUpdate(Request):
    generation: int = Field(ge=1)
    policy: EffectivePolicy
    """Put in place unless a newer version is already."""


class RuntimeFacts(Answer):
    name: str
    available: bool
    isolation: Isolation
    detail: str
    reason: str = ""


class TemplateFacts(Answer):
    name: str
    digest: str
    size_bytes: int


class NodeFacts(Answer):
    node: str
    version: str
    boot_id: str
    runtimes: list[RuntimeFacts]
    templates: list[TemplateFacts]
    cpu: int
    memory_mib: int
    disk_mib: int
    """The sum of `disk_mib` that sandboxes may be promised, those that are there included."""
    max_sandboxes: int


class SandboxFacts(Answer):
    id: str
    generation: int
    alive: bool
    exit_reason: str = ""
    """Why it is not alive, as far as the host can tell."""
    runtime: str
    isolation: Isolation
    isolation_detail: str
    template: str
    template_digest: str
    started_at: datetime | None = None


class SandboxStats(Answer):
    id: str
    memory_bytes: int
    cpu_seconds: float
    processes: int
    disk_used_bytes: int
