"""Removing whole folders as root, never through a mount that is still there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cpuos.errors import Conflict

__all__ = ["is_below", "mount_points", "remove_tree"]


def remove_tree(folder: Path) -> None:
    """Remove a folder, if it is there; refuses while something is mounted below it, for that would be emptied too."""
    left = [point for point in mount_points() if is_below(point, os.path.realpath(folder))]
    if left:
        raise Conflict(f"cannot remove {folder}", f"still mounted: {', '.join(left)}", hint=f"umount {left[0]}")
    if folder.exists():
        shutil.rmtree(folder)


def mount_points() -> list[str]:
    """Where something is mounted, as this process sees it."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4].encode().decode("unicode_escape") for line in lines]


def is_below(path: str, root: str) -> bool:
    """Whether `path` is `root` or lies in it; both without links and dots."""
    return path == root or path.startswith(f"{root}/")
