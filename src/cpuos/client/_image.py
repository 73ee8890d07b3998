"""Where an image of others is taken from: a registry's reference, or files of this machine as one archive."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuos.client._recipe import RecipeFile
from cpuos.errors import InvalidRequest
from cpuos.types.template import ARCHIVE, CREDENTIALS

__all__ = ["Image", "image_name", "open_image"]


@dataclass(frozen=True, kw_only=True)
class Image:
    values: dict[str, Any]
    """As the server is told of it."""
    uploads: list[RecipeFile]


@contextmanager
def open_image(
    source: str | os.PathLike[str], *, credentials: tuple[str, str] | None, insecure: bool
) -> Iterator[Image]:
    """The files to upload are there as long as it is open."""
    if isinstance(source, os.PathLike):
        if credentials is not None or insecure:
            raise _refused(Path(source), "credentials and insecure are for registries")
        with _archive(Path(source)) as file:
            yield Image(values={"archive": {"sha256": file.sha256, "size": file.size}}, uploads=[file])
        return
    values = {"reference": source, "credentials": credentials is not None, "insecure": insecure}
    if credentials is None:
        yield Image(values=values, uploads=[])
        return
    user, password = credentials
    opens = base64.b64encode(f"{user}:{password}".encode()).decode()
    text = json.dumps({"auths": {source.partition("/")[0]: {"auth": opens}}}).encode()
    digest = hashlib.sha256(text).hexdigest()
    file = RecipeFile(path=CREDENTIALS, content=text, sha256=digest, size=len(text), mode=0o600)
    yield Image(values=values, uploads=[file])


def image_name(source: str | os.PathLike[str]) -> str:
    """What a template of it is called where nobody says."""
    text = Path(source).name if isinstance(source, os.PathLike) else source.partition("@")[0].rpartition("/")[2]
    name = text.removesuffix(".tar") if isinstance(source, os.PathLike) else text.partition(":")[0]
    return re.sub("[^a-z0-9._-]", "-", name.lower()).lstrip("._-")[:63]


@contextmanager
def _archive(local: Path) -> Iterator[RecipeFile]:
    if not local.is_dir():
        yield _measured(local)
        return
    if not (local / "oci-layout").is_file():
        raise _refused(local, "it is a folder without the file oci-layout: no OCI layout")
    with tempfile.TemporaryDirectory(prefix="cpuos-image-") as folder:
        packed = Path(folder, "archive")
        _pack(local, packed)
        yield _measured(packed)


def _pack(layout: Path, target: Path) -> None:
    """Equal layouts give equal archives."""
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(layout.rglob("*")):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise _refused(path, "an OCI layout holds files and folders alone")
            entry = tarfile.TarInfo(path.relative_to(layout).as_posix())
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
                continue
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)


def _measured(local: Path) -> RecipeFile:
    try:
        if not local.is_file():
            raise _refused(local, "it is no regular file" if local.exists() else "there is no such file or folder")
        with local.open("rb") as file:
            digest, size = hashlib.file_digest(file, "sha256"), file.tell()
    except OSError as error:
        raise _refused(local, error.strerror or str(error)) from error
    return RecipeFile(path=ARCHIVE, content=local, sha256=digest.hexdigest(), size=size, mode=0o600)


def _refused(local: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"cannot build template of an image: {os.fspath(local)!r}", why, details={"field": "image"})
