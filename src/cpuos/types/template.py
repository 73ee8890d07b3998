"""Template: a prepared root image that sandboxes start from, and the build that makes one."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from cpuos.types.base import Answer, Request
from cpuos.types.error import Error
from cpuos.types.sandbox import Access

__all__ = [
    "BUILT_IMAGE_PATTERN",
    "UNKEPT_FOLDERS",
    "Build",
    "BuildCreated",
    "BuildFile",
    "BuildState",
    "BuildStep",
    "BuildUpdate",
    "Dropped",
    "StepState",
    "TemplateBuild",
    "TemplateInfo",
]

BUILT_IMAGE_PATTERN = r"^built-[a-z0-9]{20}$"
"""How a node calls the image of a build; users call templates by their own names."""
UNKEPT_FOLDERS = ("/workspace", "/tmp", "/proc", "/sys", "/dev", "/.cpuos")
"""Other file systems lie over these in each sandbox: an image holds nothing in them."""

TemplateName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
# What a package manager takes for a package: no option, no address of another server, no space.
Package = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9+._:~=<>!\[\],*-]*$", min_length=1, max_length=200)
]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_READY = re.compile(r"port:([0-9]{1,5})")
MAX_FILES = 10_000
MAX_TEXT = 64 << 10


class BuildFile(Request):
    """A file of the image. Its content is uploaded into the build sandbox; the build checks the digest there."""

    path: Annotated[str, StringConstraints(max_length=1024)]
    sha256: Sha256
    size: int = Field(ge=0, le=1 << 40)
    mode: int = Field(0o644, ge=0, le=0o7777)

    @field_validator("path")
    @classmethod
    def _inside_the_image(cls, value: str) -> str:
        parts = value.split("/")
        if parts[0] or not parts[1:] or any(part in ("", ".", "..") for part in parts[1:]):
            raise ValueError("write the whole path from / on, without . and ..")
        if _CONTROL.search(value):
            raise ValueError("a path has no control characters")
        for folder in UNKEPT_FOLDERS:
            if value == folder or value.startswith(f"{folder}/"):
                raise ValueError(f"{folder} is not part of an image: each sandbox has its own; use /opt or /home/user")
        return value


class TemplateBuild(Request):
    """What a template is made of. Equal fields on an equal parent are the same image."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    name: TemplateName
    from_: TemplateName = Field("base", alias="from")
    files: list[BuildFile] = Field(default_factory=list, max_length=MAX_FILES)
    """Laid down first, as root's."""
    apt: list[Package] = Field(default_factory=list, max_length=500)
    pip: list[Package] = Field(default_factory=list, max_length=500)
    run: list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]] = Field(
        default_factory=list, max_length=100
    )
    """Last, each by `bash -e` as root in /."""
    env: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")], str] = Field(
        default_factory=dict, max_length=200
    )
    """Of the steps, and of every command in its sandboxes."""
    start: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)] | None = None
    """Runs in each new sandbox from the create on."""
    ready: Annotated[str, StringConstraints(max_length=64)] | None = None
    """`port:8000`: a create answers when something listens there."""
    cpu: int = Field(2, ge=1, le=64)
    memory_mib: int = Field(2048, ge=128, le=1 << 20)
    disk_mib: int = Field(8192, ge=64, le=1 << 22)
    """Of the build sandbox; holds the changes and the finished image."""
    timeout_s: float = Field(1800, gt=0, le=4 * 3600)
    """The whole build, from the create of its sandbox to the finished template."""

    @field_validator("env")
    @classmethod
    def _one_line_each(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if _CONTROL.search(text) or len(text) > 4096:
                raise ValueError(f"{name}: a value is one line of at most 4096 characters")
        return value

    @field_validator("ready")
    @classmethod
    def _a_port(cls, value: str | None) -> str | None:
        match = _READY.fullmatch(value or "port:1")
        if match is None or not 1 <= int(match[1]) <= 65535:
            raise ValueError("write port:NUMBER, for example port:8000")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.ready is not None and self.start is None:
            raise ValueError("ready waits for what start runs; give start too")
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("files: a path is there twice")
        return self

    @property
    def ready_port(self) -> int | None:
        return None if self.ready is None else int(self.ready.partition(":")[2])


class BuildUpdate(Request):
    uploaded: Literal[True]
    """All its files are there: it may run."""


class Dropped(Answer):
    """What the image does not hold, as the build sandbox told it."""

    path: str
    what: str
    """`security.capability` and other extended attributes, `device`, `socket`."""


class TemplateInfo(Answer):
    """Manifest of a template."""

    name: str
    digest: str
    """Of the image's bytes."""
    size_bytes: int
    built: bool = True
    """False: it came with the installation, and what follows is empty."""
    parent: str = ""
    parent_digest: str = ""
    steps: list[str] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    """Path to SHA-256."""
    env: dict[str, str] = Field(default_factory=dict)
    start: str | None = None
    ready: str | None = None
    dropped: list[Dropped] = Field(default_factory=list)
    """The first 100."""
    dropped_count: int = 0
    key: str = ""
    """Of all that went in: equal keys reuse the image."""
    created_at: datetime | None = None
    created_by: str = ""


class BuildState(StrEnum):
    UPLOADING = "uploading"
    """Waits for its files."""
    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (BuildState.READY, BuildState.FAILED)


class StepState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class BuildStep(Answer):
    name: str
    """`files`, `apt`, `pip`, `run 1`, …, `pack`, `store`, `try`."""
    text: str
    state: StepState = StepState.PENDING
    command: str | None = None
    """Of the build sandbox: its output is the step's log."""


class Build(Answer):
    id: str
    name: str
    state: BuildState
    reused: bool = False
    """The same had been built before; nothing ran."""
    sandbox: str | None = None
    """Its record and the output of its commands stay readable after its end."""
    steps: list[BuildStep] = Field(default_factory=list)
    error: Error | None = None
    template: TemplateInfo | None = None
    created_at: datetime
    ended_at: datetime | None = None


class BuildCreated(Answer):
    build: Build
    access: Access | None = None
    """The way into the build sandbox; none when nothing has to be built."""
