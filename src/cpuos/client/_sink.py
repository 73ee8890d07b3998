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
        given = (("stdout", on_stdout), ("stderr", on_stderr))
        self._callbacks = {name: callback for name, callback in given if callback}
        self._splitters = {name: LineSplitter() for name in self._callbacks}
        self.tail = None if self._splitters else limit // 2
        """Without callbacks the middle need not be sent at all: this many bytes at both ends do."""

    def take(self, event: Output | Gap) -> tuple[LineCallback, list[str]] | None:
        """Keep the event; answers the callback that is now due, and the lines for it."""
        stream = event.stream
        splitter = self._splitters.get(stream)
        if type(event) is Output:
            self._kept[stream].feed(event.data)
            lines = splitter.feed(event.data) if splitter else None
        else:
            self._kept[stream].skip_to(event.to)
            lines = splitter.flush() if splitter else None
        return (self._callbacks[stream], lines) if lines else None

    def finish(self) -> list[tuple[LineCallback, list[str]]]:
        """Calls for last lines without an end."""
        return [(self._callbacks[stream], splitter.flush()) for stream, splitter in self._splitters.items()]

    def result(self, command: Command) -> Result:
        return make_result(command, stdout=self._kept["stdout"].kept(), stderr=self._kept["stderr"].kept())
