"""What forwarder and peek tell, one JSON object a datagram. They read guests' bytes, so it is checked like those."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

__all__ = ["Lost", "PeekClosed", "PeekOpened", "Refused", "Report", "Resolved", "read_report"]

_Name = Annotated[str, Field(max_length=255)]
_Rule = Annotated[str, Field(max_length=400)]
_Port = Annotated[int, Field(ge=0, le=65535)]
_Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
_Id = Annotated[str, Field(max_length=40)]


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True)

    sandbox: str = Field(max_length=20)


class Resolved(_Report):
    event: Literal["resolved"]
    name: _Name
    address: IPv4Address


class Refused(_Report):
    event: Literal["refused"] = "refused"
    kind: Literal["dns", "tcp"]
    name: _Name | None = None
    address: IPv4Address | None = None
    port: _Port | None = None
    rule: _Rule


class PeekOpened(_Report):
    event: Literal["open"]
    id: _Id
    name: _Name | None = None
    address: IPv4Address
    port: _Port
    source_port: _Port | None = None
    rule: _Rule


class PeekClosed(_Report):
    event: Literal["closed"]
    id: _Id
    bytes_sent: _Bytes
    bytes_received: _Bytes


class Lost(_Report):
    """So many reports of a sandbox could not be sent."""

    event: Literal["lost"]
    count: int = Field(ge=1)


Report = Resolved | Refused | PeekOpened | PeekClosed | Lost
_REPORT: TypeAdapter[Any] = TypeAdapter(Report)


def read_report(datagram: bytes) -> Report | None:
    """None for what is none."""
    try:
        report: Report = _REPORT.validate_json(datagram)
    except ValueError:
        return None
    return report
