"""What a disk that nobody uses holds: a mark that any change of its files moves, and a digest of what is in them.

It blocks; errors are OSError.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cpuos.node.storage.copying import data_ranges

__all__ = ["digest_of", "mark_of", "only_moved"]

_BLOCK = 1 << 20
_FIELDS = 5
_ZEROS = bytes(_BLOCK)


def mark_of(files: Sequence[Path], *, sync: bool = True) -> str:
    """Put them on disk, unless not asked, and say by what a change is seen: the kernel moves the last number with each,
    whoever makes it. Empty where none is there."""
    marks = []
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            if sync:
                os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        marks.append(f"{path.name}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}")
    return " ".join(marks)


def only_moved(before: str, now: str) -> bool:
    """Whether these marks differ as those of files do that were copied to another place with their times."""
    first, then = ([file.split(":") for file in mark.split(" ")] for mark in (before, now))
    if len(first) != len(then) or not all(len(file) == _FIELDS for file in [*first, *then]):
        return False
    alike = [(name, size, moment) for name, _, size, moment, _ in first]
    return alike == [(name, size, moment) for name, _, size, moment, _ in then] and all(
        one[1] != other[1] for one, other in zip(first, then, strict=True)
    )


def digest_of(files: Sequence[Path], *, go_on: Callable[[], bool]) -> str | None:
    """The same for a copy with other holes: blocks of zeros are none. None when it is not to go on."""
    digest = hashlib.sha256()
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            size = os.fstat(descriptor).st_size
            digest.update(f"{path.name} {size}\n".encode())
            for number in _blocks(descriptor):
                if not go_on():
                    return None
                block = os.pread(descriptor, _BLOCK, number * _BLOCK)
                if block != _ZEROS[: len(block)]:
                    digest.update(b"%d %d\n" % (number, len(block)))
                    digest.update(block)
        finally:
            os.close(descriptor)
    return digest.hexdigest()


def _blocks(descriptor: int) -> Iterator[int]:
    """Numbers of those in which there is data, in order."""
    following = 0
    for start, end in data_ranges(descriptor):
        for number in range(max(following, start // _BLOCK), (end - 1) // _BLOCK + 1):
            yield number
            following = number + 1
