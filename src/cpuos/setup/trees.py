"""Removing whole folders as root, never through a mount that is still there."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from cpuos.errors import Conflict

__all__ = ["is_below", "mount_points", "remove_tree"]


def remove_tree(folder: Path) -> None:
    """Remove a folder, if it is there; refuses while something is mounted below it, for that would be emptied too.

    What cannot be removed does not keep the rest; it is told at the end.
    """
    left = [point for point in mount_points() if is_below(point, os.path.realpath(folder))]
    if left:
        raise Conflict(f"cannot remove {folder}", f"still mounted: {', '.join(left)}", hint=f"umount {left[0]}")
    failed: list[tuple[str, OSError]] = []

    def note(action: object, path: str, info: tuple[type[BaseException], BaseException, object]) -> None:
        if isinstance(info[1], OSError) and not isinstance(info[1], FileNotFoundError):
            failed.append((path, info[1]))

    if folder.exists():
        shutil.rmtree(folder, onerror=note)
    if failed:
        path, error = failed[0]
        hint = f"ls -la {shlex.quote(os.path.dirname(path))}"
        raise Conflict(f"cannot remove {folder}", f"{path} stays: {error.strerror or error}", hint=hint)


def mount_points() -> list[str]:
    """Where something is mounted, as this process sees it."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4].encode().decode("unicode_escape") for line in lines]


def is_below(path: str, root: str) -> bool:
    """Whether `path` is `root` or lies in it; both without links and dots."""
    return path == root or path.startswith(f"{root}/")
