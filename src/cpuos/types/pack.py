"""Data packs: a folder as a read-only image, which any number of sandboxes have at a path of theirs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from cpuos.types.base import Answer, Request

__all__ = [
    "MAX_PACKS",
    "PACK_IMAGE_PATTERN",
    "AttachedPack",
    "Pack",
    "PackCreate",
    "PackFacts",
    "PackImage",
    "PackList",
    "PackName",
    "PackPath",
]

PACK_IMAGE_PATTERN = r"^pack-[a-z0-9]{20}$"
MAX_PACKS = 16
"""At one sandbox."""

# Nothing may lie over what the sandbox itself has there, or below what comes and goes.
_NEVER_BELOW = frozenset({".cpuos", "dev", "proc", "run", "sys", "tmp", "workspace"})
_NEVER_OVER = frozenset(
    {"bin", "boot", "etc", "home", "lib", "lib32", "lib64", "opt", "root", "sbin", "srv", "usr", "var"}
)


def _checked_path(value: str) -> str:
    parts = value.split("/")[1:]
    if any(part in (".", "..") for part in parts):
        raise ValueError("it has no . and no .. in it")
    if parts[0] in _NEVER_BELOW or (len(parts) == 1 and parts[0] in _NEVER_OVER):
        raise ValueError(f"a pack cannot lie at {value}; take a folder of its own, such as /data/NAME")
    return value


PackName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
PackImage = Annotated[str, StringConstraints(pattern=PACK_IMAGE_PATTERN)]
"""How a node calls it: given once."""
PackPath = Annotated[
    str,
    StringConstraints(pattern=r"^(/[A-Za-z0-9._-]{1,64}){1,8}$"),
    AfterValidator(_checked_path),
]


class PackCreate(Request):
    name: PackName
    """What sandboxes call it from now on; those that have the pack of that name so far keep it."""
    path: Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=4096)] = "/workspace"
    """The folder in the sandbox, whose content becomes the pack's."""


class AttachedPack(Answer):
    name: str
    digest: str
    image: str


class Pack(Answer):
    name: str
    digest: str
    size_bytes: int
    files: int
    """As the sandbox told that it was made in."""
    created_at: datetime
    created_by: str


class PackList(Answer):
    packs: list[Pack] = Field(default_factory=list)


class PackFacts(Answer):
    """What a node has."""

    image: str
    digest: str
    size_bytes: int
