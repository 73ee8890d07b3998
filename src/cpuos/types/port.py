"""Port: a server inside a sandbox, published under a host name of its own."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cpuos.types.base import Answer, Request

__all__ = ["MAX_EXPIRES_S", "Port", "PortAccess", "PortCreate", "PortList"]

MAX_EXPIRES_S = 7 * 86400


def _no_agent(value: int) -> int:
    if value == 1:
        raise ValueError("port 1 is the sandbox's agent's own")
    return value


PortNumber = Annotated[int, Field(ge=1, le=65535), AfterValidator(_no_agent)]


class PortCreate(Request):
    port: PortNumber
    public: bool = False
    """Whoever has the URL may see it. It stays so until the port is closed, or `expires_s` is over."""
    expires_s: float | None = Field(None, gt=0, le=MAX_EXPIRES_S)
    """Of a private port: how long the token is good, an hour unless given. Of a public one: how long it is public."""
    host: Literal["localhost"] | None = None
    """The server inside gets `localhost:PORT` as Host and Origin instead of the preview's name."""


class Port(Answer):
    """A published port."""

    port: int
    url: str
    public: bool
    public_until: datetime | None = None
    """None of a public one: until it is closed."""
    host: str | None = None
    created_at: datetime
    created_by: str


class PortAccess(Answer):
    """The way to a published port. A private one opens with `token`: as `?cpuos_token=`, or in the header
    `X-Cpuos-Preview-Token`."""

    port: int
    url: str
    """Without the token."""
    public: bool
    token: str | None = None
    """None: it was asked for a public port."""
    expires_at: datetime | None = None


class PortList(Answer):
    ports: list[Port]
