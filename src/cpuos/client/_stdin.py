"""What a program is given to read: bytes, text or a file, as pieces with offsets."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from cpuos.errors import InvalidRequest

__all__ = ["PIPE", "Pipe", "Stdin", "stdin_pieces"]

PIECE_BYTES = 1 << 18


class Pipe(Enum):
    PIPE = "pipe"


PIPE = Pipe.PIPE
"""As `stdin` of spawn: the program's input stays open for `job.write_stdin`."""

Stdin = bytes | bytearray | memoryview | str | Iterable[bytes] | Any


def stdin_pieces(stdin: Stdin) -> Iterator[bytes]:
    """Pieces of any kind of input. Files are read as bytes come (`read1`), so a terminal works too."""
    if isinstance(stdin, str):
        stdin = stdin.encode()
    if isinstance(stdin, bytes | bytearray | memoryview):
        view = memoryview(stdin).cast("B")
        return (bytes(view[start : start + PIECE_BYTES]) for start in range(0, len(view), PIECE_BYTES))
    if hasattr(stdin, "read"):
        return _file_pieces(stdin)
    if isinstance(stdin, Iterable):
        return (piece.encode() if isinstance(piece, str) else bytes(piece) for piece in stdin)
    raise InvalidRequest(
        f"cannot pass stdin: {type(stdin).__name__}", "stdin is bytes, str, a file opened for reading, or None"
    )


def _file_pieces(file: Any) -> Iterator[bytes]:
    if isinstance(file, io.TextIOBase) and hasattr(file, "buffer"):
        file = file.buffer
    read = getattr(file, "read1", file.read)
    while piece := read(PIECE_BYTES):
        yield piece.encode() if isinstance(piece, str) else piece
