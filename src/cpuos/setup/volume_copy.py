"""A folder's content moved to another file system: copied, and compared before anything counts on it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from cpuos.setup.host import Host

__all__ = ["copy_tree", "first_difference", "used_mib"]

_PIECE = 1 << 20


def copy_tree(host: Host, source: Path, target: Path) -> None:
    """With owners, modes, times, links and holes."""
    host.run(["cp", "--archive", "--sparse=always", f"{source}/.", target])


def used_mib(folder: Path) -> int:
    """What its files take, each once."""
    seen, used = set(), 0
    for path in _walk(folder):
        status = (folder / path).lstat()
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            used += status.st_blocks * 512
    return -(-used >> 20)


def first_difference(one: Path, other: Path, *, without: Collection[str] = ()) -> str:
    """The first path, below both, in which they differ; empty where they are alike. Names in `without` are passed over
    at the top."""
    left, right = [
        {path: (folder / path).lstat() for path in _walk(folder) if path.split("/")[0] not in without}
        for folder in (one, other)
    ]
    if left.keys() != right.keys():
        return min(left.keys() ^ right.keys())
    firsts: dict[tuple[int, int], str] = {}
    others: dict[tuple[int, int], str] = {}
    for path in sorted(left):
        before, after = left[path], right[path]
        # Names of one file there are names of one here.
        first = firsts.setdefault((before.st_dev, before.st_ino), path)
        if others.setdefault((after.st_dev, after.st_ino), path) != first or _facts(before) != _facts(after):
            return path
        if first == path and not _same_content(one / path, other / path, before.st_mode):
            return path
    return ""


def _facts(status: os.stat_result) -> tuple[int, ...]:
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    moment = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
    return (status.st_mode, status.st_uid, status.st_gid, size, moment)


def _same_content(one: Path, other: Path, mode: int) -> bool:
    if stat.S_ISLNK(mode):
        return os.readlink(one) == os.readlink(other)
    if {name: os.getxattr(one, name) for name in os.listxattr(one)} != {
        name: os.getxattr(other, name) for name in os.listxattr(other)
    }:
        return False
    return not stat.S_ISREG(mode) or _same_bytes(one, other)


def _same_bytes(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        # Where either has data: all else are holes in both.
        for number in sorted({*_pieces(left.fileno()), *_pieces(right.fileno())}):
            if os.pread(left.fileno(), _PIECE, number * _PIECE) != os.pread(right.fileno(), _PIECE, number * _PIECE):
                return False
    return True


def _pieces(descriptor: int) -> Iterator[int]:
    offset, size = 0, os.fstat(descriptor).st_size
    while offset < size:
        try:
            start = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as problem:
            if problem.errno == errno.ENXIO:  # a hole until the end
                return
            raise
        offset = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield from range(start // _PIECE, -(-offset // _PIECE))


def _walk(folder: Path) -> Iterator[str]:
    yield "."
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            yield os.path.relpath(os.path.join(parent, name), folder)
