"""The two kinds of wire type."""

from pydantic import BaseModel, ConfigDict

__all__ = ["Answer", "Request"]


class Request(BaseModel):
    """What a caller sends: an unknown field is an error, so that a typo never passes as a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(BaseModel):
    """What cpuOS answers: unknown fields pass, so that an older client reads a newer server."""

    model_config = ConfigDict(extra="ignore", frozen=True)
