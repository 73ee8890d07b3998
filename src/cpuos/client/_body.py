"""Bodies of uploads: pieces of a size that moves fast, made anew for a second attempt where that is possible."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cpuos.errors import InvalidRequest

__all__ = ["PIECE_BYTES", "Body", "make_body"]

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Body:
    pieces: Callable[[], Iterator[bytes]]
    length: int | None
    """None: not known before the end."""
    rewinds: bool
    """True: `pieces` can be called again and gives the same bytes."""
    in_memory: bool
    """True: making a piece takes no waiting."""


def make_body(data: Any) -> Body:
    """A body of bytes, text (as UTF-8), a file opened for reading, or an iterable of bytes."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        return Body(pieces=lambda: _slices(view), length=len(view), rewinds=True, in_memory=True)
    if hasattr(data, "read"):
        return _file_body(data)
    if isinstance(data, Iterable):
        return Body(pieces=lambda: map(_as_bytes, data), length=None, rewinds=False, in_memory=False)
    raise InvalidRequest(
        f"cannot write file: data is {type(data).__name__}",
        "data is bytes, str, a file opened for reading, or an iterable of bytes",
    )


def _file_body(file: Any) -> Body:
    if isinstance(file, io.TextIOBase) and hasattr(file, "buffer"):
        file = file.buffer
    try:
        start = file.tell()
        length = file.seek(0, os.SEEK_END) - start
        file.seek(start)
    except (AttributeError, OSError, ValueError):
        return Body(pieces=lambda: _read(file), length=None, rewinds=False, in_memory=False)
    if isinstance(file, io.TextIOBase):
        # Its positions are not counts of bytes.
        return Body(pieces=lambda: _read(file), length=None, rewinds=False, in_memory=False)

    def pieces() -> Iterator[bytes]:
        file.seek(start)
        return _read(file, limit=length)

    return Body(pieces=pieces, length=length, rewinds=True, in_memory=isinstance(file, io.BytesIO))


def _read(file: Any, limit: int | None = None) -> Iterator[bytes]:
    left = limit
    while left is None or left > 0:
        piece = _as_bytes(file.read(PIECE_BYTES if left is None else min(PIECE_BYTES, left)))
        if not piece:
            return
        if left is not None:
            left -= len(piece)
        yield piece


def _slices(view: memoryview) -> Iterator[Any]:
    return (view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))


def _as_bytes(piece: Any) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece
