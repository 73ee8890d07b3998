"""Where a folder or file is packed, and how large the disk must be."""

from __future__ import annotations

from pathlib import Path

from cpuos.errors import InvalidRequest

__all__ = ["disk_for", "place_for"]

_LEAST_MIB, _MORE_MIB = 256, 128
# Each file takes whole blocks, and an inode.
_FILE_BYTES = 8192


def disk_for(path: Path) -> int:
    """MiB; the folder is uploaded to the disk, and its image is made beside it."""
    if not path.exists():
        raise InvalidRequest(f"cannot make data pack of {path}", "there is no such folder or file")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    taken = sum(file.stat().st_size + _FILE_BYTES for file in files)
    return max(_LEAST_MIB, (taken * 9 // 8 >> 20) + _MORE_MIB)


def place_for(path: Path, *, below: str) -> str:
    """What is in a folder lies in `below`, and so does a file, under its own name."""
    return below if path.is_dir() else f"{below}/{path.name}"
