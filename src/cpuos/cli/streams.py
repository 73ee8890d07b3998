"""Output of a program in a sandbox to our stdout and stderr, and our stdin to it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from cpuos.cli.output import Output
from cpuos.cli.terminal import Keep, SafeStream, terminal_size
from cpuos.errors import CpuosError

__all__ = ["GuestWriter", "passed_stdin", "print_output"]

_CHUNK = 1 << 16


def print_output(output: Output, events: Iterable[Any]) -> None:
    """A command's stream on our stdout and stderr; what is no longer held is told, not skipped."""
    writers = {"stdout": GuestWriter(sys.stdout), "stderr": GuestWriter(sys.stderr)}
    offsets = {"stdout": 0, "stderr": 0}
    try:
        for event in events:
            if hasattr(event, "data"):
                writers[event.stream].write(event.data)
                offsets[event.stream] += len(event.data)
            else:
                lost = event.to - offsets[event.stream]
                output.progress(f"cpuos: {lost} bytes of {event.stream} are no longer held")
                offsets[event.stream] = event.to
    finally:
        for writer in writers.values():
            writer.close()


class GuestWriter:
    """Output of a command on one of our streams: its bytes as they are into a pipe or file, made safe on a terminal."""

    def __init__(self, stream: IO[str], *, keep: Keep = Keep.COLOURS) -> None:
        self._stream = stream
        self._safe = SafeStream(keep) if stream.isatty() else None

    def write(self, data: bytes) -> None:
        if self._safe is None:
            self._stream.flush()
            self._stream.buffer.write(data)
            self._stream.buffer.flush()
        else:
            self._stream.write(self._safe.feed(data))
            self._stream.flush()

    def close(self) -> None:
        if self._safe is not None:
            self._stream.write(self._safe.close())
            self._stream.flush()


@contextlib.contextmanager
def passed_stdin(
    send: Callable[[bytes], object],
    *,
    end: Callable[[], object] | None = None,
    resize: Callable[[int, int], object] | None = None,
) -> Iterator[None]:
    """Within the block each piece of stdin goes to `send`, its end to `end`, a new window size to `resize`.

    It is read on a thread of its own, so that output flows meanwhile.
    """
    wake, bell = os.pipe()
    os.set_blocking(bell, False)
    thread = threading.Thread(target=_pass_on, args=(wake, send, end, resize), name="cpuos-stdin", daemon=True)
    before = signal.signal(signal.SIGWINCH, lambda number, frame: os.write(bell, b"w")) if resize else None
    thread.start()
    try:
        yield
    finally:
        if resize:
            signal.signal(signal.SIGWINCH, before)
        os.write(bell, b"q")
        thread.join(timeout=2)
        if not thread.is_alive():
            os.close(wake)
            os.close(bell)


def _pass_on(
    wake: int,
    send: Callable[[bytes], object],
    end: Callable[[], object] | None,
    resize: Callable[[int, int], object] | None,
) -> None:
    # The descriptor, not the file object: a thread left in a buffered read would spoil the interpreter's exit.
    stdin = sys.stdin.fileno()
    try:
        while True:
            ready, _, _ = select.select([stdin, wake], [], [])
            if wake in ready:
                if b"q" in os.read(wake, _CHUNK):
                    return
                if resize:
                    resize(*terminal_size())
            if stdin in ready:
                data = os.read(stdin, _CHUNK)
                if data:
                    send(data)
                    continue
                if end:
                    end()
                return
    except (CpuosError, OSError):
        # The program has ended or the stream was cut: whoever follows the output meets the same and says why.
        return
