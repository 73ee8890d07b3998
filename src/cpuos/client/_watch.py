"""File events out of the bytes of a watch."""

from __future__ import annotations

from pydantic import ValidationError

from cpuos.client._http import answer_error
from cpuos.errors import PlatformError
from cpuos.types.files import FileEvent
from cpuos.types.frames import FrameDecoder, FrameError, FrameKind

__all__ = ["EventReader"]


class EventReader:
    def __init__(self) -> None:
        self._decoder = FrameDecoder()
        self.ended = False
        """The other side said that nothing more comes."""

    def feed(self, data: bytes) -> list[FileEvent]:
        events = []
        try:
            for frame in self._decoder.feed(data):
                if frame.kind is FrameKind.EVENT:
                    events.append(FileEvent.model_validate_json(frame.payload))
                elif frame.kind is FrameKind.ENDED:
                    self.ended = True
                elif frame.kind is FrameKind.ERROR:
                    raise answer_error(500, frame.payload)
        except (FrameError, ValidationError) as error:
            raise PlatformError("cannot read file events: bytes outside the contract", str(error)) from error
        return events
