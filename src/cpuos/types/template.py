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
    "ARCHIVE",
    "BUILT_IMAGE_PATTERN",
    "CREDENTIALS",
    "UNKEPT_FOLDERS",
    "Build",
    "BuildCreated",
    "BuildFile",
    "BuildState",
    "BuildStep",
    "BuildUpdate",
    "Dropped",
    "ImageArchive",
    "ImageInfo",
    "ImageSource",
    "StepState",
    "TemplateBuild",
    "TemplateInfo",
]

BUILT_IMAGE_PATTERN = r"^built-[a-z0-9]{20}$"
"""How a node calls the image of a build; users call templates by their own names."""
ARCHIVE = "/workspace/.cpuos-build/archive"
"""Where in a build's sandbox an image is uploaded to."""
CREDENTIALS = "/workspace/.cpuos-build/auth.json"
"""And what opens a registry. The build removes it when it has fetched; nothing else ever has it."""
UNKEPT_FOLDERS = ("/workspace", "/tmp", "/proc", "/sys", "/dev", "/.cpuos")
"""Other file systems lie over these in each sandbox: an image holds nothing in them."""

TemplateName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
# What a package manager takes for a package: no option, no address of another server, no space.
Package = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9+._:~=<>!\[\],*-]*$", min_length=1, max_length=200)
]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# Halves of surrogate pairs are no text either, though JSON can say them.
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
# A host with a dot or a port, names, and a tag or a digest or both: what the registry protocol has, and nothing local.
_HOST = r"(?:[a-z0-9][a-z0-9-]*(?:\.[a-z0-9-]+)+|localhost)(?::[0-9]{1,5})?|[a-z0-9][a-z0-9-]*:[0-9]{1,5}"
_REFERENCE = re.compile(
    rf"(?P<repository>(?:{_HOST})(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)+)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
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


class ImageArchive(Request):
    """An OCI layout as a tar file, or what `docker save` writes. It is uploaded into the build sandbox."""

    sha256: Sha256
    size: int = Field(ge=0, le=1 << 40)


class ImageSource(Request):
    """An image of others: in a registry, or an archive that the caller uploads."""

    reference: Annotated[str, StringConstraints(max_length=512)] | None = None
    archive: ImageArchive | None = None
    credentials: bool = False
    """A file with what opens the registry is uploaded too. It is seen by the build sandbox alone."""
    insecure: bool = False
    """Take a registry that speaks plain HTTP, or whose certificate nobody vouches for."""

    @field_validator("reference")
    @classmethod
    def _of_a_registry(cls, value: str | None) -> str | None:
        if value is not None and _REFERENCE.fullmatch(value) is None:
            raise ValueError(
                "write HOST/NAME:TAG or HOST/NAME@sha256:DIGEST, for example docker.io/library/alpine:3.20"
            )
        return value

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.reference is None) == (self.archive is None):
            raise ValueError("give either reference or archive")
        if self.archive is not None and (self.credentials or self.insecure):
            raise ValueError("credentials and insecure are for registries")
        return self

    @property
    def repository(self) -> str:
        """The reference without tag and digest."""
        match = _REFERENCE.fullmatch(self.reference or "")
        return match["repository"] if match is not None else ""

    @property
    def digest(self) -> str | None:
        """What it is for certain, before it is fetched; None for a tag."""
        if self.archive is not None:
            return f"sha256:{self.archive.sha256}"
        match = _REFERENCE.fullmatch(self.reference or "")
        return match["digest"] if match is not None else None


class ImageInfo(Answer):
    """What a template was made of, as its build sandbox told it."""

    reference: str = ""
    """Empty: an archive."""
    digest: str
    """Of the manifest that the registry has under the reference, or of that in the archive."""
    architecture: str = ""
    entrypoint: list[str] = Field(default_factory=list)
    command: list[str] = Field(default_factory=list)
    user: str = "root"
    """What it starts runs as this user."""
    folder: str = "/"
    """And in this folder."""
    shell: str = "bash"
    left_out: list[str] = Field(default_factory=list)
    """Of its settings, what a sandbox cannot have."""


class TemplateBuild(Request):
    """What a template is made of. Equal fields on an equal parent are the same image."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    name: TemplateName
    from_: TemplateName = Field("base", alias="from")
    image: ImageSource | None = None
    """An image of others, instead of all that follows but `env`, `start` and `ready`; `from` is what unpacks it."""
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
    fresh: bool = False
    """Do every step anew, whatever was built before."""

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
        if self.ready is not None and self.start is None and self.image is None:
            raise ValueError("ready waits for what start runs; give start too")
        if self.image is not None and (self.files or self.apt or self.pip or self.run):
            raise ValueError("image: files, apt, pip and run are for another build, from the template that this makes")
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("files: a path is there twice")
        return self

    @property
    def ready_port(self) -> int | None:
        return None if self.ready is None else int(self.ready.partition(":")[2])

    @property
    def uploads(self) -> bool:
        """It waits for files of the caller."""
        image = self.image
        return bool(self.files) or (image is not None and (image.archive is not None or image.credentials))


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
    image: ImageInfo | None = None
    """It was made of this instead."""
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
    """`files`, `apt`, `pip`, `run 1`, …, or `fetch`, `unpack`, `fit`; then `pack`, `store`, `try`."""
    text: str
    state: StepState = StepState.PENDING
    cached: bool = False
    """It was done by an earlier build, and what it left was taken up."""
    command: str | None = None
    """Of the build sandbox: its output is the step's log."""


class Build(Answer):
    id: str
    name: str
    state: BuildState
    reused: bool = False
    """The same had been built before, or by a build at the same time; nothing ran for this one."""
    sandbox: str | None = None
    """Its record and the output of its commands stay readable after its end. None: an equal build does the work; when
    that comes to nothing this one gets a sandbox."""
    steps: list[BuildStep] = Field(default_factory=list)
    error: Error | None = None
    template: TemplateInfo | None = None
    created_at: datetime
    ended_at: datetime | None = None


class BuildCreated(Answer):
    build: Build
    access: Access | None = None
    """The way into the build sandbox; none when nothing has to be built."""
