"""Link: a URL that downloads one file of a sandbox, to give away."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from cpuos.types.base import Answer, Request

__all__ = ["Link", "LinkCreate"]


class LinkCreate(Request):
    path: Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
    """In the sandbox; a relative one counts from /workspace."""
    expires_s: float = Field(600, gt=0, le=7 * 86400)


class Link(Answer):
    url: str
    expires_at: datetime
