"""QEMU's machine protocol, for what needs descriptors: saving a machine and taking one up. All of it blocks.

What comes back is the VMM's, which a guest may have taken over: lines and a stream, both of bounded length. Nothing
here looks into the stream. Errors are OSError.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from cpuos.runtimes.descriptors import is_readable

__all__ = ["Qmp", "go_on", "load_state", "read_message", "save_state", "standing_still"]

_MAX_LINE = 1 << 20
_PIECE = 1 << 20
_POLL_S = 0.005
_NO_LIMIT = 1 << 40
_STREAM = "state"


def read_message(line: bytes, key: str) -> dict[str, Any]:
    """One with this key, or of an event. What refuses, or is neither, is an OSError."""
    try:
        message = json.loads(line)
        if not isinstance(message, dict):
            raise TypeError
        if "error" in message:
            raise OSError(str(message["error"].get("desc", "it refused"))[:500])
        if key not in message:
            message["event"]
        return message
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise OSError(f"it answered something else: {line[:100]!r}") from problem


class Qmp:
    """One connection."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.deadline = time.monotonic() + timeout_s
        self._rest = b""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
            self._answer("QMP")
            self("qmp_capabilities")
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def __call__(self, command: str, *, descriptor: int | None = None, **arguments: object) -> Any:
        """The answer. `descriptor` goes along."""
        line = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        self._socket.settimeout(max(0.001, self.deadline - time.monotonic()))
        if descriptor is None:
            self._socket.sendall(line)
        else:
            socket.send_fds(self._socket, [line], [descriptor])
        return self._answer("return")

    def until(self, command: str, key: str, values: frozenset[str]) -> str:
        """Ask again and again, until what it says is one of these."""
        while True:
            answer = self(command)
            said = str(answer.get(key, "")) if isinstance(answer, dict) else ""
            if said in values:
                return said
            if time.monotonic() > self.deadline:
                raise OSError(f"it stays {said or 'silent'}")
            time.sleep(_POLL_S)

    def _answer(self, key: str) -> Any:
        """The next answer; events come in between."""
        while True:
            if key in (message := read_message(self._line(), key)):
                return message[key]
            if time.monotonic() > self.deadline:
                raise OSError("it tells of events without end")

    def _line(self) -> bytes:
        while b"\n" not in self._rest:
            self._socket.settimeout(max(0.001, self.deadline - time.monotonic()))
            piece = self._socket.recv(65536)
            if not piece:
                raise OSError("it closed the connection")
            self._rest += piece
            if len(self._rest) > _MAX_LINE:
                raise OSError("it answered without an end")
        line, _, self._rest = self._rest.partition(b"\n")
        return line


@contextmanager
def standing_still(path: Path, *, timeout_s: float) -> Iterator[Qmp]:
    """No processor of the machine runs and no write is under way; it runs on afterwards, also after a failure."""
    with Qmp(path, timeout_s=timeout_s) as qmp:
        qmp("stop")
        try:
            yield qmp
        finally:
            qmp("cont")


def save_state(qmp: Qmp, target: int, *, memory: bool, limit_bytes: int) -> None:
    """Write what its devices are, and its memory if that is asked for."""
    _prepare(qmp, memory=memory)
    qmp("migrate-set-parameters", **{"max-bandwidth": _NO_LIMIT})
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            qmp("getfd", descriptor=write, fdname=_STREAM)
        finally:
            os.close(write)
        qmp("migrate", uri=f"fd:{_STREAM}")
        _take(read, target, limit_bytes=limit_bytes, deadline=qmp.deadline)
    finally:
        os.close(read)
    if qmp.until("query-migrate", "status", frozenset({"completed", "failed", "cancelled"})) != "completed":
        raise OSError("it could not be saved")


def load_state(path: Path, saved: Path, *, memory: bool, timeout_s: float) -> None:
    """Take up a machine that waits for its state, which is that with or without its memory; it runs then."""
    source = os.open(saved, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with Qmp(path, timeout_s=timeout_s) as qmp:
            _prepare(qmp, memory=memory)
            # Its neighbours know where it is: no word of it is needed that it is here now.
            qmp("migrate-set-parameters", **{"announce-rounds": 0})
            qmp("getfd", descriptor=source, fdname=_STREAM)
            qmp("migrate-incoming", uri=f"fd:{_STREAM}")
            # It stood still when it was saved, and does so again.
            qmp.until("query-status", "status", frozenset({"paused", "running"}))
            qmp("cont")
    finally:
        os.close(source)


def go_on(path: Path, *, timeout_s: float) -> None:
    """It runs, whatever somebody who was to save it has left. Running is fine."""
    with Qmp(path, timeout_s=timeout_s) as qmp:
        answer = qmp("query-migrate")
        if isinstance(answer, dict) and answer.get("status") in ("setup", "active", "device", "pre-switchover"):
            qmp("migrate_cancel")
            qmp.until("query-migrate", "status", frozenset({"cancelled", "completed", "failed"}))
        qmp("cont")


def _prepare(qmp: Qmp, *, memory: bool) -> None:
    # Memory that is a file stays there: both ends have to know.
    qmp("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": not memory}])


def _take(read: int, target: int, *, limit_bytes: int, deadline: float) -> None:
    """Everything up to its end, which must come in time and below the limit."""
    taken = 0
    while True:
        if not is_readable(read, limit_s=deadline - time.monotonic()):
            raise OSError("it did not end its state in time")
        piece = os.read(read, _PIECE)
        if not piece:
            return
        taken += len(piece)
        if taken > limit_bytes:
            raise OSError(f"its state is larger than {limit_bytes} bytes")
        while piece:
            piece = piece[os.write(target, piece) :]
