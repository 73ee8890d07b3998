"""Network policy, and the record of connections."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cpuos.types.base import Answer, Request
from cpuos.types.targets import parse_target

__all__ = [
    "Connection",
    "ConnectionKind",
    "ConnectionList",
    "EffectivePolicy",
    "NetworkMode",
    "NetworkPolicy",
    "PolicyLayer",
    "RefusedConnection",
    "SandboxNetwork",
    "Verdict",
    "WorkspaceNetwork",
]

MAX_TARGETS = 256
MAX_LAYERS = 4


class NetworkMode(StrEnum):
    INTERNET = "internet"
    """Everything but what is always blocked, and what `deny` names."""
    ALLOWLIST = "allowlist"
    """Only what `allow` names."""
    OFF = "off"
    """Nothing, operator exceptions included."""


class NetworkPolicy(Request):
    """What a sandbox may reach. `deny` wins over `allow`; what is always blocked wins over both.

    A bare word stands for the mode: "internet" or "off". A list of `allow` without a mode means allowlist.
    """

    mode: NetworkMode = NetworkMode.INTERNET
    allow: list[str] = Field(default_factory=list, max_length=MAX_TARGETS)
    """Targets as in `cpuos.types.targets`: `*.example.com`, `1.2.3.0/24:443`. Only with mode allowlist."""
    deny: list[str] = Field(default_factory=list, max_length=MAX_TARGETS)

    @model_validator(mode="before")
    @classmethod
    def _read_short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"mode": value}
        if isinstance(value, dict) and value.get("allow") is not None and value.get("mode") is None:
            return {**value, "mode": NetworkMode.ALLOWLIST}
        return value

    @field_validator("allow", "deny")
    @classmethod
    def _canonical(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(parse_target(text).text for text in value))

    @model_validator(mode="after")
    def _lists_fit_the_mode(self) -> NetworkPolicy:
        if self.allow and self.mode is not NetworkMode.ALLOWLIST:
            raise ValueError(f"an allow list goes with mode allowlist, not {self.mode}")
        return self


class PolicyLayer(Request):
    origin: Literal["workspace", "sandbox"]
    policy: NetworkPolicy


class EffectivePolicy(Request):
    """What holds for one sandbox: a destination must be allowed by every layer."""

    version: int = Field(ge=1)
    """Rises with each change, of whichever layer."""
    layers: list[PolicyLayer] = Field(min_length=1, max_length=MAX_LAYERS)

    def and_also(self, other: EffectivePolicy) -> EffectivePolicy:
        """What both allow, under this one's version."""
        layers = [*self.layers, *(layer for layer in other.layers if layer not in self.layers)]
        if len(layers) > MAX_LAYERS:
            layers = [PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))]
        return EffectivePolicy(version=self.version, layers=layers)


class Verdict(StrEnum):
    ALLOWED = "allowed"
    REFUSED = "refused"


class ConnectionKind(StrEnum):
    TCP = "tcp"
    UDP = "udp"
    ICMP = "icmp"
    DNS = "dns"
    """A name that was asked for and refused; there is no address then."""
    OTHER = "other"
    """Any other protocol: always refused."""
    GAP = "gap"
    """`count` connections are known from counters only; their records were lost."""


class Connection(Answer):
    """One outbound connection, or `count` equal refused tries. Seen from outside the guest."""

    id: int
    at: datetime
    sandbox: str
    command: str | None = None
    """The one that ran at that moment; None where none or several did. A process that an ended command left running is
    not told apart from it."""
    kind: ConnectionKind
    name: str | None = None
    """The host name: read from TLS or HTTP, or else the last name that was answered with this address."""
    address: str | None = None
    port: int | None = None
    verdict: Verdict
    rule: str
    """What decided, in words: "internet", "sandbox allow *.example.com", "always blocked: link-local"."""
    count: int = 1
    bytes_sent: int | None = None
    """By the sandbox; None while it is open, and for refused ones."""
    bytes_received: int | None = None
    ended_at: datetime | None = None


class ConnectionList(Answer):
    connections: list[Connection]
    next_after: int | None = None


class RefusedConnection(Answer):
    """Part of a command's result: what it tried and was not allowed to reach."""

    at: datetime
    kind: ConnectionKind
    name: str | None = None
    address: str | None = None
    port: int | None = None
    rule: str
    reason: str
    """One sentence that tells a person or a model what happened and what would help."""
    count: int = 1


class SandboxNetwork(Answer):
    """The network policy of one sandbox: its own, its workspace's, and whether both hold already."""

    policy: NetworkPolicy
    workspace_policy: NetworkPolicy
    """A destination must be allowed by this one too."""
    version: int
    """Rises with each change of either."""
    applied: bool
    """False for the moments until the node has put the newest version in place."""


class WorkspaceNetwork(Answer):
    """The network policy that holds for every sandbox of a workspace, beside its own."""

    policy: NetworkPolicy
