"""State of one command's output stream over any number of connections; knows where to go on after a cut.

The offsets in the frames are the truth: bytes that came before are skipped, bytes that are missing are a gap. The
stream is whole only after ENDED; a connection that stops earlier is a cut, never an end.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from cpuos.errors import OutputLost, PlatformError, error_from_body
from cpuos.types.command import Command
from cpuos.types.frames import FrameError, FrameKind, FramePieces

__all__ = ["CommandStream", "Gap", "Output"]


class Output(NamedTuple):
    stream: str
    data: bytes


class Gap(NamedTuple):
    """The bytes up to `to` are not held any more."""

    stream: str
    to: int


class CommandStream:
    def __init__(self, *, command_id: str | None = None) -> None:
        self._pieces = FramePieces()
        self._offsets = {"stdout": 0, "stderr": 0}
        self._command_id = command_id
        self._beginning: bytes | memoryview = b""
        self.ended: Command | None = None

    @property
    def command_id(self) -> str | None:
        """None until STARTED came: until then a repeat of the start attaches, later a resume does."""
        if self._command_id is None and self._beginning:
            self._command_id = _command_id(self._beginning)
        return self._command_id

    @property
    def offsets(self) -> dict[str, int]:
        """Where a resume continues."""
        return dict(self._offsets)

    def reconnected(self) -> None:
        """Forget the part of a frame that the cut connection left."""
        self._pieces = FramePieces()

    def feed(self, data: bytes) -> list[Output | Gap]:
        """Take bytes of the body; raises the error that the other side sent in place of an end."""
        events: list[Output | Gap] = []
        try:
            for kind, offset, payload in self._pieces.feed(data):
                if kind is FrameKind.STDOUT:
                    self._take_output("stdout", offset, payload, events)
                elif kind is FrameKind.STDERR:
                    self._take_output("stderr", offset, payload, events)
                elif kind is FrameKind.GAP:
                    self._take_gap(_parse(payload), events)
                elif kind is FrameKind.STARTED:
                    self._beginning = payload  # read when it is asked for: short commands never do
                elif kind is FrameKind.ENDED:
                    self._take_end(_command(payload), events)
                elif kind is FrameKind.ERROR:
                    raise error_from_body(_parse(payload))
        except FrameError as error:
            raise PlatformError("cannot read the command stream: bytes outside the contract", str(error)) from error
        return events

    def cut_error(self, reason: str) -> OutputLost:
        """What is raised when no more resumes are tried: the command may still run, its record is on the node."""
        return OutputLost(
            f"cannot follow command {self.command_id or '(not started yet)'}: its stream was cut",
            f"{reason}; received until stdout={self._offsets['stdout']} stderr={self._offsets['stderr']}",
            code="stream_cut",
            hint="sbx.commands.get(id).wait()" if self.command_id else "cpuos status",
            details={"command_id": self.command_id, **self._offsets},
        )

    def _take_output(self, stream: str, offset: int, payload: bytes | memoryview, events: list[Output | Gap]) -> None:
        known = self._offsets[stream]
        if offset > known:
            events.append(Gap(stream, offset))
        elif offset < known:
            payload = payload[known - offset :]
            offset = known
        if payload:
            events.append(Output(stream, bytes(payload)))
        self._offsets[stream] = max(offset + len(payload), known)

    def _take_gap(self, gap: Any, events: list[Output | Gap]) -> None:
        try:
            stream, until = str(gap["stream"]), int(gap["to"])
            known = self._offsets[stream]
        except (KeyError, TypeError, ValueError):
            raise PlatformError("cannot read the command stream: a gap without its numbers") from None
        if until > known:
            events.append(Gap(stream, until))
            self._offsets[stream] = until

    def _take_end(self, command: Command, events: list[Output | Gap]) -> None:
        for stream, total in (("stdout", command.stdout_bytes), ("stderr", command.stderr_bytes)):
            if total > self._offsets[stream]:
                events.append(Gap(stream, total))
                self._offsets[stream] = total
        self._command_id = command.id
        self.ended = command


class _CommandFrame(BaseModel):
    command: Command


def _parse(payload: bytes | memoryview) -> Any:
    try:
        return json.loads(bytes(payload))
    except ValueError as error:
        raise PlatformError("cannot read the command stream: a frame is not JSON", str(error)) from error


def _command_id(payload: bytes | memoryview) -> str:
    """All that a beginning is read for."""
    try:
        return str(_parse(payload)["command"]["id"])
    except (KeyError, TypeError) as error:
        raise PlatformError("cannot read the command stream: a record is incomplete", str(error)) from error


def _command(payload: bytes | memoryview) -> Command:
    try:
        return _CommandFrame.model_validate_json(bytes(payload)).command
    except ValidationError as error:
        raise PlatformError("cannot read the command stream: a record is incomplete", str(error)) from error
