"""The files of a template build: what a caller names, as paths of the image with digest and content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuos.errors import InvalidRequest

__all__ = ["RecipeFile", "read_recipe_files"]


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    path: str
    """In the image."""
    content: bytes | Path
    """A path is of this machine."""
    sha256: str
    size: int
    mode: int

    def values(self) -> dict[str, Any]:
        """As the server is told of it."""
        return {"path": self.path, "sha256": self.sha256, "size": self.size, "mode": self.mode}


def read_recipe_files(files: Mapping[str, Any] | None) -> list[RecipeFile]:
    """Text and bytes are contents; a `Path` is a file of this machine, or a folder with all that is below it."""
    found: list[RecipeFile] = []
    for path, content in (files or {}).items():
        if isinstance(content, str):
            found.append(_of_bytes(path, content.encode()))
        elif isinstance(content, bytes):
            found.append(_of_bytes(path, content))
        elif isinstance(content, os.PathLike):
            found += _of_local(path.rstrip("/"), Path(content))
        else:
            raise InvalidRequest(
                f"cannot build template: files[{path!r}] is {type(content).__name__}",
                "a file is text or bytes, or a Path of this machine",
                hint="files={'/opt/app': Path('app')}",
                details={"field": "files"},
            )
    return found


def _of_bytes(path: str, content: bytes) -> RecipeFile:
    digest = hashlib.sha256(content).hexdigest()
    return RecipeFile(path=path, content=content, sha256=digest, size=len(content), mode=0o644)


def _of_local(path: str, local: Path) -> list[RecipeFile]:
    if not local.is_dir():
        return [_of_file(path, local)]
    found = []
    for folder, names, files in os.walk(local):
        names.sort()
        links = [name for name in (*names, *files) if os.path.islink(os.path.join(folder, name))]
        if links:
            raise _refused(Path(folder, links[0]), "it is a link; name what it stands for")
        for name in sorted(files):
            below = Path(folder, name).relative_to(local).as_posix()
            found.append(_of_file(f"{path}/{below}", Path(folder, name)))
    return found


def _of_file(path: str, local: Path) -> RecipeFile:
    try:
        if not local.is_file():
            raise _refused(local, "it is no regular file" if local.exists() else "there is no such file")
        with local.open("rb") as file:
            digest, size = hashlib.file_digest(file, "sha256"), file.tell()
    except OSError as error:
        raise _refused(local, error.strerror or str(error)) from error
    mode = 0o755 if os.access(local, os.X_OK) else 0o644
    return RecipeFile(path=path, content=local, sha256=digest.hexdigest(), size=size, mode=mode)


def _refused(local: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"cannot build template: {os.fspath(local)!r}", why, details={"field": "files"})
