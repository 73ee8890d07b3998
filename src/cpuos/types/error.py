"""The body of every error answer."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cpuos.types.base import Answer

__all__ = ["Error", "ErrorBody"]


class Error(Answer):
    code: str
    """One of the codes of the reference's errors page."""
    what: str
    why: str = ""
    hint: str = Field("", alias="try")
    """What to try next; often a command that can be pasted."""
    details: dict[str, Any] = Field(default_factory=dict)


class ErrorBody(Answer):
    error: Error
