"""A long step on somebody's screen: what it is, for how long it has gone on, and what it said last.

On a terminal one line that is drawn anew; elsewhere a line now and then, so that a log tells waiting from hanging.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["PLAIN_S", "Work", "drawn", "duration_text", "size_text", "told"]

PLAIN_S = 15.0
"""So often a line is written where there is no terminal."""
_TIMED_S = 5.0
"""Before that nobody asks how long it has been."""


class Work:
    """One step that goes on."""

    def __init__(self, text: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = text
        self._clock = clock
        self._since = clock()
        self._last = ""
        self._printed_at = self._since

    def say(self, line: str) -> None:
        """What it printed; only the last is shown."""
        if shown := "".join(letter for letter in line if letter.isprintable()).strip():
            self._last = shown

    def printed(self) -> None:
        """Something of it was printed, so that it needs no line to show that it goes on."""
        self._printed_at = self._clock()

    def silent_s(self) -> float:
        return self._clock() - self._printed_at

    def line(self, *, width: int = 200) -> str:
        """The step, its time once that is worth telling, and the last line of its output in the room that is left."""
        spent = self._clock() - self._since
        head = f"{self.text} ({duration_text(spent)})" if spent >= _TIMED_S else self.text
        room = width - len(head) - 2
        return f"{head}  {self._last[:room]}" if self._last and room > 10 else head[:width]

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(self.line(), no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def drawn(work: Work, console: Console) -> Iterator[Work]:
    """On a terminal. What is printed meanwhile stands above the line."""
    with console.status(work):
        yield work


@contextlib.contextmanager
def told(
    work: Work, stream: TextIO, *, before: Callable[[], str] = lambda: "", every_s: float = PLAIN_S
) -> Iterator[Work]:
    """Where there is no terminal: silent, unless it takes long. `before` is written in front of each line."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every_s):
            if work.silent_s() < every_s:
                continue
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.write(f"{before()}{work.line()}\n")
                stream.flush()

    thread = threading.Thread(target=tell, name="cpuos-still-working", daemon=True)
    thread.start()
    try:
        yield work
    finally:
        ended.set()
        thread.join()


def duration_text(seconds: float) -> str:
    """Seconds as people write times."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def size_text(mib: float) -> str:
    """MiB as people write sizes."""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
