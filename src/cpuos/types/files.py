"""File metadata. A path that is not UTF-8 comes with its bytes beside a readable text."""

from __future__ import annotations

import base64
import os
from datetime import datetime
from enum import StrEnum

from cpuos.types.base import Answer

__all__ = ["FileEvent", "FileInfo", "FileKind", "FileList", "path_bytes"]


class FileKind(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


class FileInfo(Answer):
    path: str
    """Absolute. Bytes that are not UTF-8 are shown as U+FFFD; then `raw` holds the true bytes."""
    raw: str | None = None
    """Base64 of the path's bytes, only when they are not UTF-8."""
    kind: FileKind
    size: int
    mode: int
    """Permission bits, with setuid, setgid and sticky."""
    user: str
    group: str
    uid: int
    gid: int
    modified_at: datetime
    link_target: str | None = None

    @property
    def fs_path(self) -> str:
        """The path as Python names files (surrogateescape): usable in every call, also when not UTF-8."""
        return os.fsdecode(base64.b64decode(self.raw)) if self.raw else self.path

    @property
    def name(self) -> str:
        return self.fs_path.rstrip("/").rpartition("/")[2] or "/"


class FileList(Answer):
    entries: list[FileInfo]
    truncated: bool = False


class FileEvent(Answer):
    kind: str
    """created, modified, removed, moved (then `moved_to`), or overflow: events were lost, list again."""
    path: str
    raw: str | None = None
    moved_to: str | None = None


def path_bytes(path: str) -> bytes:
    """The bytes of a path given as Python names files."""
    return os.fsencode(path)
