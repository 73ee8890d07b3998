"""Audit entries: an intent before each action, an outcome after it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from cpuos.types.base import Answer

__all__ = ["ACTIONS", "AuditEntry", "AuditList", "AuditPhase", "AuditResult"]


# Every kind of entry: what the server does, and what the gateway does in a sandbox.
ACTIONS = (
    "sandbox.create",
    "sandbox.update",
    "sandbox.kill",
    "sandbox.expire",
    "sandbox.lost",
    "sandbox.recreate",
    "sandbox.network",
    "sandbox.pause",
    "sandbox.resume",
    "sandbox.restore_incomplete",
    "sandbox.snapshot",
    "sandbox.fork",
    "snapshot.fork",
    "snapshot.delete",
    "workspace.network",
    "workspace.alarms",
    "alarm.begin",
    "alarm.end",
    "template.build",
    "template.delete",
    "build.update",
    "build.cancel",
    "access.create",
    "link.create",
    "port.open",
    "port.close",
    "command.start",
    "command.kill",
    "file.read",
    "limit.reached",
    "file.write",
    "file.remove",
    "file.mkdir",
    "file.move",
    "file.read_tree",
    "file.write_tree",
    "node.pressure",
    "node.volume",
    "storage.prune",
    "pack.create",
    "pack.delete",
    "audit.prune",
    "sandbox.prune",
)


class AuditPhase(StrEnum):
    INTENT = "intent"
    OUTCOME = "outcome"


class AuditResult(StrEnum):
    OK = "ok"
    ERROR = "error"
    UNKNOWN = "unknown"


class AuditEntry(Answer):
    id: int
    at: datetime
    workspace: str
    actor: str
    action: str
    """Noun and verb: sandbox.create, command.start, file.write …"""
    target: str
    """What it was done to: a sandbox's id, a command's id, a path."""
    sandbox: str | None = None
    phase: AuditPhase
    intent_id: int | None = None
    result: AuditResult | None = None
    detail: dict[str, Any] = Field(default_factory=dict)


class AuditList(Answer):
    entries: list[AuditEntry]
    next_after: int | None = None
