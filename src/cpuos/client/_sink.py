"""Where a command's output goes in the client: into the result, and line by line to callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cpuos.client._output import HeadTail, LineSplitter
from cpuos.client._stream import Gap, Output
from cpuos.client.result import Result, make_result
from cpuos.types.command import Command
from cpuos.types.units import parse_size_bytes

__all__ = ["LineCallback", "OutputSink"]

LineCallback = Callable[[str], Any]


class OutputSink:
    def __init__(
        self, *, on_stdout: LineCallback | None, on_stderr: LineCallback | None, max_output: str | int
    ) -> None:
        limit = parse_size_bytes(max_output, name="max_output")
        # One budget a stream: a noisy stderr does not eat what stdout may keep.
        self._kept = {"stdout": HeadTail(limit), "stderr": HeadTail(limit)}
        self._callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        self._splitters = {name: LineSplitter() for name, callback in self._callbacks.items() if callback}
        self.tail = None if self._splitters else limit // 2
        """Without callbacks the middle need not be sent at all: this many bytes at both ends do."""

    def take(self, event: Output | Gap) -> list[tuple[LineCallback, str]]:
        """Keep the event; answers the calls that are now due, in order."""
        stream = event.stream
        if type(event) is Output:
            self._kept[stream].feed(event.data)
            if stream not in self._splitters:
                return []
            return self._calls(stream, self._splitters[stream].feed(event.data))
        self._kept[stream].skip_to(event.to)
        return self._calls(stream, self._splitters[stream].flush()) if stream in self._splitters else []

    def finish(self) -> list[tuple[LineCallback, str]]:
        """Calls for last lines without an end."""
        return [call for stream, splitter in self._splitters.items() for call in self._calls(stream, splitter.flush())]

    def result(self, command: Command) -> Result:
        return make_result(command, stdout=self._kept["stdout"].kept(), stderr=self._kept["stderr"].kept())

    def _calls(self, stream: str, lines: list[str]) -> list[tuple[LineCallback, str]]:
        callback = self._callbacks[stream]
        return [(callback, line) for line in lines] if callback else []
