"""A host's files as they are, for reading alone: of this machine, or of a folder with a recorded one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostView"]

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HostView:
    """Paths are those of the host, from its root; nothing that is not there or not to be read is an error."""

    root: Path = Path("/")

    def text(self, path: str) -> str | None:
        """What the file says; None where it cannot be told."""
        try:
            with open(self._place(path), "rb") as file:
                return file.read(_MAX_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Of what lies in the folder."""
        try:
            return sorted(os.listdir(self._place(path)))
        except OSError:
            return []

    def facts(self, path: str) -> os.stat_result | None:
        """Owner and mode of the thing itself, behind links; None where there is none."""
        try:
            return os.stat(self._place(path))
        except OSError:
            return None

    def _place(self, path: str) -> Path:
        return self.root / path.lstrip("/")
