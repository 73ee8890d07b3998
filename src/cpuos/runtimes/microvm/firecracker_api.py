"""Firecracker's API over its socket: one connection a call, bounded in size and time, and nothing is followed.

The other end is a process that a guest may have taken over. So an answer is read up to fixed sizes, has to be HTTP/1.1
of the plainest kind, and what it says is data: an object, or the text of a refusal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MAX_BODY", "MAX_HEAD", "Call", "Refused", "call"]

MAX_HEAD, MAX_BODY = 8 << 10, 64 << 10
_MAX_TEXT = 500


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request: what the public description names an operation."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class Refused(OSError):
    """It answered, with another status than success."""


async def call(control: Path, wanted: Call, *, timeout_s: float) -> dict[str, Any]:
    """Its answer; an empty one where it has nothing to say. Raises OSError, and `Refused` with its own words."""
    try:
        async with asyncio.timeout(timeout_s):
            status, text = await _exchange(control, wanted)
    except TimeoutError as problem:
        raise OSError(f"{wanted}: no answer within {timeout_s:g} s") from problem
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as problem:
        raise OSError(f"{wanted}: {_what_is_wrong(problem)}") from problem
    if status not in (200, 204):
        raise Refused(f"{wanted}: {status}: {_fault(text)}")
    if not text:
        return {}
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise OSError(f"{wanted}: it answered something else than JSON") from problem
    if not isinstance(answer, dict):
        raise OSError(f"{wanted}: it answered no object")
    return answer


async def _exchange(control: Path, wanted: Call) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_unix_connection(control, limit=MAX_HEAD)
    try:
        writer.write(_to_bytes(wanted))
        await writer.drain()
        status, length = _read_head(await reader.readuntil(b"\r\n\r\n"))
        return status, await reader.readexactly(length)
    finally:
        writer.close()


def _to_bytes(wanted: Call) -> bytes:
    lines = [f"{wanted.method} {wanted.path} HTTP/1.1", "Host: localhost", "Accept: application/json"]
    body = b""
    if wanted.body is not None:
        body = json.dumps(wanted.body).encode()
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _read_head(head: bytes) -> tuple[int, int]:
    """Status and length of the body. Raises ValueError."""
    lines = head.decode("ascii").split("\r\n")
    words = lines[0].split(" ")
    if words[0] != "HTTP/1.1" or len(words) < 2 or len(words[1]) != 3 or not words[1].isdigit():
        raise ValueError("it answered something else than HTTP/1.1")
    length = None
    for line in filter(None, lines[1:]):
        name, _, value = line.partition(":")
        if name.lower() == "transfer-encoding":
            raise ValueError("it answered in pieces")
        if name.lower() == "content-length":
            if length is not None or not value.strip().isdigit() or len(value) > 20:
                raise ValueError("it answered with a length that is none")
            length = int(value)
    if (length or 0) > MAX_BODY:
        raise ValueError(f"it answered {length} bytes, over the limit of {MAX_BODY}")
    status = int(words[1])
    return status, 0 if status == 204 else length or 0


def _what_is_wrong(problem: Exception) -> str:
    if isinstance(problem, asyncio.IncompleteReadError):
        return "it closed the connection"
    if isinstance(problem, asyncio.LimitOverrunError):
        return f"it answered headers over the limit of {MAX_HEAD} bytes"
    return "it answered something else than text" if isinstance(problem, UnicodeError) else str(problem)


def _fault(text: bytes) -> str:
    """The `fault_message` of the description's Error, on one line without control characters."""
    try:
        answer = json.loads(text)
        said = answer["fault_message"] if isinstance(answer, dict) else text.decode(errors="replace")
    except (ValueError, KeyError, RecursionError):
        said = text.decode(errors="replace")
    return (
        "".join(letter if letter.isprintable() else " " for letter in str(said)[:_MAX_TEXT]).strip()
        or "no reason given"
    )
