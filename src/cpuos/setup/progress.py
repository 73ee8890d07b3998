"""What set-up shows while it works: a plan, then one line a step; live on a terminal, plain text elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console
from rich.markup import escape

from cpuos.live import PLAIN_S, Work, drawn, duration_text, size_text, told

if TYPE_CHECKING:
    from cpuos.setup.engine import Step

__all__ = [
    "LiveProgress",
    "PlainProgress",
    "Progress",
    "QuietProgress",
    "choose_progress",
    "plan_lines",
]


class Progress(Protocol):
    """How a set-up is followed."""

    def plan(self, steps: Sequence[Step], *, done: int, log: Path) -> None:
        """Called once, before the first step runs."""

    def step(self, step: Step, *, number: int, total: int) -> contextlib.AbstractContextManager[None]:
        """Around each step; an exception through it is its failure."""

    def waiting(self, text: str) -> contextlib.AbstractContextManager[object]:
        """Around a wait that is no step."""

    def line(self, text: str) -> None:
        """Something a running command printed, or a word on the way."""


class QuietProgress:
    """Shows nothing."""

    def plan(self, steps: Sequence[Step], *, done: int, log: Path) -> None: ...

    @contextlib.contextmanager
    def step(self, step: Step, *, number: int, total: int) -> Iterator[None]:
        yield

    def waiting(self, text: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def line(self, text: str) -> None: ...


class PlainProgress:
    """One finished line a step, for logs and pipes, and a line now and then in a long one."""

    def __init__(self, stream: TextIO, *, every_s: float = PLAIN_S) -> None:
        self._stream = stream
        self._every_s = every_s
        self._work: Work | None = None
        self._is_open = False
        """The step's line has no end yet."""

    def plan(self, steps: Sequence[Step], *, done: int, log: Path) -> None:
        for line in plan_lines(steps, done=done, log=log):
            self._write(line)

    @contextlib.contextmanager
    def step(self, step: Step, *, number: int, total: int) -> Iterator[None]:
        started = time.monotonic()
        name = f"[{number}/{total}] {step.name}"
        self._stream.write(f"{name}: {step.plan} … ")
        self._stream.flush()
        self._is_open = True
        end = "failed"
        try:
            with told(Work(name), self._stream, before=self._end_line, every_s=self._every_s) as self._work:
                yield
            end = f"done in {duration_text(time.monotonic() - started)}"
        finally:
            self._work = None
            self._stream.write("" if self._is_open else f"{name}: ")
            self._is_open = False
            self._write(end)

    def waiting(self, text: str) -> contextlib.AbstractContextManager[object]:
        self._write(text)
        return told(Work(text), self._stream, every_s=self._every_s)

    def line(self, text: str) -> None:
        if text.startswith(("waiting", "next try", "kept")):
            self._write(self._end_line() + text)
        elif self._work is not None:
            self._work.say(text)

    def _end_line(self) -> str:
        was_open, self._is_open = self._is_open, False
        return "\n" if was_open else ""

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveProgress:
    """A spinner with the step, its time and the last line of output."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._work: Work | None = None

    def plan(self, steps: Sequence[Step], *, done: int, log: Path) -> None:
        for line in plan_lines(steps, done=done, log=log):
            self._console.print(line, highlight=False, markup=False)

    @contextlib.contextmanager
    def step(self, step: Step, *, number: int, total: int) -> Iterator[None]:
        text = f"[{number}/{total}] {step.name}: {step.plan}"
        started = time.monotonic()
        try:
            with drawn(Work(text), self._console) as self._work:
                yield
        except BaseException:
            self._console.print(f"{escape(text)} [red]failed[/red]", highlight=False)
            raise
        finally:
            self._work = None
        spent = duration_text(time.monotonic() - started)
        self._console.print(f"{escape(text)} [green]done[/green] in {spent}", highlight=False)

    def waiting(self, text: str) -> contextlib.AbstractContextManager[object]:
        return drawn(Work(text), self._console)

    def line(self, text: str) -> None:
        if self._work is None:
            self._console.print(text, highlight=False, markup=False)
        else:
            self._work.say(text)


def choose_progress(stream: TextIO) -> Progress:
    """Live on a terminal, plain elsewhere."""
    if stream.isatty():
        return LiveProgress(Console(file=stream))
    return PlainProgress(stream)


def plan_lines(steps: Sequence[Step], *, done: int, log: Path) -> list[str]:
    """The plan: what each step does, what it downloads and keeps, how long it takes."""
    width = max(len(step.name) for step in steps)
    lines = [f"set-up: {len(steps)} steps to do, {done} done already; log: {log}"]
    for step in steps:
        sizes = []
        if step.download_mib:
            sizes.append(f"downloads {size_text(step.download_mib)}")
        if step.disk_mib:
            sizes.append(f"keeps {size_text(step.disk_mib)}")
        sizes.append(f"about {duration_text(step.duration_s)}")
        lines.append(f"  {step.name:<{width}}  {step.plan}: {', '.join(sizes)}")
    download, disk = (sum(getattr(step, name) for step in steps) for name in ("download_mib", "disk_mib"))
    total = duration_text(sum(step.duration_s for step in steps))
    lines.append(f"  together downloads {size_text(download)}, keeps {size_text(disk)}, takes about {total}")
    return lines
