"""What a look at one thing of this machine says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["SETUP", "Check", "CheckState", "missing", "ok", "warn"]

SETUP = "sudo cpuos setup"


class CheckState(StrEnum):
    """How a thing is."""

    OK = "ok"
    WARNING = "warning"
    """It works without, less well."""
    MISSING = "missing"
    """Sandboxes do not work without."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: CheckState
    evidence: str
    fix: str = ""
    """The command that mends it; empty when nothing is to be mended."""


def ok(name: str, evidence: str) -> Check:
    return Check(name=name, state=CheckState.OK, evidence=evidence)


def warn(name: str, evidence: str, *, fix: str) -> Check:
    return Check(name=name, state=CheckState.WARNING, evidence=evidence, fix=fix)


def missing(name: str, evidence: str, *, fix: str) -> Check:
    return Check(name=name, state=CheckState.MISSING, evidence=evidence, fix=fix)
