"""Files of JSON, a line each, that are only ever appended to: also after a cut in the middle of a line."""

from __future__ import annotations

import os
from typing import BinaryIO

__all__ = ["last_lines"]

_BLOCK = 1 << 16


def last_lines(file: BinaryIO, *, most: int = 1) -> tuple[list[bytes], int]:
    """The last lines that are whole, the newest last, and where they end: what follows there was cut within a line."""
    at = size = file.seek(0, os.SEEK_END)
    tail = b""
    while at and tail.count(b"\n") <= most:
        at = max(0, at - _BLOCK)
        file.seek(at)
        tail = file.read(size - at)
    whole = tail[: tail.rfind(b"\n") + 1]
    return whole.split(b"\n")[:-1][-most:], at + len(whole)
