"""Evidence of one run: what the host saw and what the guest said, kept apart, in a folder that appears whole.

evidence/
  evidence.json     this file's `Evidence`
  script/NAME       the script that ran
  stdout.txt        recorded output (head and tail where it was longer than kept; the numbers say so)
  stderr.txt
  artifacts/        what the script wrote below out/
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mimetypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cpuos.errors import InvalidRequest

__all__ = [
    "Artifact",
    "CommandEvidence",
    "Evidence",
    "EvidenceStatus",
    "FileEvidence",
    "GuestEvidence",
    "HostEvidence",
    "SandboxEvidence",
    "describe_artifacts",
    "describe_file",
    "evidence_folder",
    "read_values",
]

_MAX_DEPTH = 16
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
)
_TEXT_SUFFIXES = frozenset({".csv", ".tsv", ".json", ".txt", ".md", ".html", ".svg", ".xml"})


class EvidenceStatus(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class FileEvidence(_Part):
    name: str
    sha256: str
    size: int


class Artifact(FileEvidence):
    """`name` is the path below artifacts/; hash and size are of the bytes that arrived."""

    media_type: str


class SandboxEvidence(_Part):
    id: str
    template: str
    template_digest: str
    runtime: str
    isolation: str
    isolation_detail: str
    memory_mib: int


class CommandEvidence(_Part):
    """The gateway's record, kept outside the sandbox."""

    id: str
    argv: list[str]
    cwd: str
    status: str
    reason: str
    started_at: datetime | None
    ended_at: datetime | None
    duration_s: float | None
    stdout_bytes: int
    stderr_bytes: int
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int


class HostEvidence(_Part):
    """Measured or decided outside the sandbox."""

    sandbox: SandboxEvidence
    inputs: list[FileEvidence]
    script: FileEvidence
    command: CommandEvidence | None
    artifacts: list[Artifact]


class GuestEvidence(_Part):
    """Told by the sandbox: its program could have said anything. Names in `host.artifacts` are its choice as well."""

    exit_code: int | None
    signal: int | None
    values: dict[str, Any] | None
    values_from: Literal["out/values.json", "stdout", "none"]


class Evidence(_Part):
    schema_version: Literal["cpuos.evidence/1"] = "cpuos.evidence/1"
    profile: str
    status: EvidenceStatus
    reason: str
    """Why it failed; empty on success."""
    notes: list[str]
    """What a reader should know although the run succeeded, such as that the script gave no values."""
    host: HostEvidence
    guest: GuestEvidence


def describe_file(path: Path) -> FileEvidence:
    """Hash and size of a file of the user's."""
    digest, size = _hash(path)
    return FileEvidence(name=path.name, sha256=digest, size=size)


def describe_artifacts(folder: Path) -> list[Artifact]:
    """Every regular file below `folder`, sorted by name; links are not followed."""
    artifacts = []
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_symlink() or not path.is_file():
                continue
            digest, size = _hash(path)
            # A name may hold bytes that are not UTF-8; JSON cannot, so they are shown as \xNN.
            shown = os.fsencode(path.relative_to(folder)).decode(errors="backslashreplace")
            artifacts.append(Artifact(name=shown, sha256=digest, size=size, media_type=_media_type(path)))
    return artifacts


def read_values(text: str, *, limit: int) -> dict[str, Any]:
    """A JSON object of bounded size and depth, without NaN; ValueError says what is wrong."""
    if len(text) > limit:
        raise ValueError(f"it is over {limit} bytes")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"it is nested over {_MAX_DEPTH} deep") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    _check_depth(value, _MAX_DEPTH)
    return value


@contextmanager
def evidence_folder(target: Path, *, tell: Callable[[str], None] = lambda text: None) -> Iterator[Path]:
    """A folder to fill beside `target`; it takes the target's place at the end, or vanishes on an exception.

    An earlier evidence folder is kept under a name with its time; anything else that is in the way is refused before
    work starts.
    """
    target = Path(os.path.abspath(target))
    _check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        _check_target(target)
        if target.exists() and any(target.iterdir()):
            kept = _name_with_time(target)
            target.rename(kept)
            tell(f"kept the earlier {target.name} as {kept.name}")
        draft.rename(target)  # an empty folder gives way
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _name_with_time(folder: Path) -> Path:
    """A free name beside it, with the time at which its evidence was written."""
    written = datetime.fromtimestamp((folder / "evidence.json").stat().st_mtime)
    name = f"{folder.name}-{written:%Y%m%d-%H%M%S}"
    names = (folder.with_name(name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in names if not os.path.lexists(path))


def _check_target(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InvalidRequest(
            f"cannot write evidence to: {target}", "it is there already and no folder", hint=_another(target)
        )
    if target.is_dir() and any(target.iterdir()) and not _is_evidence(target):
        raise InvalidRequest(
            f"cannot write evidence to: {target}",
            "the folder has files of something else, which are not overwritten",
            hint=_another(target),
        )


def _another(target: Path) -> str:
    names = (target.with_name(f"{target.name}-{number}") for number in itertools.count(2))
    free = next(path for path in names if not os.path.lexists(path))
    return f"--out {os.path.relpath(free)}"


def _is_evidence(folder: Path) -> bool:
    try:
        written = json.loads((folder / "evidence.json").read_text())
        return str(written["schema_version"]).startswith("cpuos.evidence/")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _hash(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return digest, file.tell()


def _media_type(path: Path) -> str:
    """By the first bytes where the kind has a signature; a name alone only vouches for kinds of text."""
    with path.open("rb") as file:
        head = file.read(16)
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    if path.suffix.lower() in _TEXT_SUFFIXES:
        return mimetypes.guess_type(path.name)[0] or "text/plain"
    return "application/octet-stream"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any, left: int) -> None:
    if left == 0:
        raise ValueError(f"it is nested over {_MAX_DEPTH} deep")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)
