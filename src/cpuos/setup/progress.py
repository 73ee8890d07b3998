"""What set-up shows while it works: a plan, then one line a step; live on a terminal, plain text elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.status import Status

if TYPE_CHECKING:
    from cpuos.setup.engine import Step

__all__ = [
    "LiveProgress",
    "PlainProgress",
    "Progress",
    "QuietProgress",
    "choose_progress",
    "duration_text",
    "plan_lines",
    "size_text",
]


class Progress(Protocol):
    """How a set-up is followed."""

    def plan(self, steps: Sequence[Step], *, done: int, log: Path) -> None:
        """Called once, before the first step runs."""

    def step(self, step: Step, *, number: int, total: int) -> contextlib.AbstractContextManager[None]:
        """Around each step; an exception through it is its failure."""

    def line(self, text: str) -> None:
        """Something a running command printed, or a wait."""


class QuietProgress:
    """Shows nothing."""

    def plan(self, steps: Sequence[Step], *, done: int, log: Path) -> None: ...

    @contextlib.contextmanager
    def step(self, step: Step, *, number: int, total: int) -> Iterator[None]:
        yield

    def line(self, text: str) -> None: ...


class PlainProgress:
    """One finished line a step, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def plan(self, steps: Sequence[Step], *, done: int, log: Path) -> None:
        for line in plan_lines(steps, done=done, log=log):
            self._write(line)

    @contextlib.contextmanager
    def step(self, step: Step, *, number: int, total: int) -> Iterator[None]:
        started = time.monotonic()
        self._stream.write(f"[{number}/{total}] {step.name}: {step.plan} … ")
        self._stream.flush()
        try:
            yield
        except BaseException:
            self._write("failed")
            raise
        self._write(f"done in {duration_text(time.monotonic() - started)}")

    def line(self, text: str) -> None:
        if text.startswith(("waiting", "next try", "kept")):
            self._write(text)

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveProgress:
    """A spinner with the step, its time and the last line of output."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._prefix = ""
        self._started = 0.0

    def plan(self, steps: Sequence[Step], *, done: int, log: Path) -> None:
        for line in plan_lines(steps, done=done, log=log):
            self._console.print(line, highlight=False, markup=False)

    @contextlib.contextmanager
    def step(self, step: Step, *, number: int, total: int) -> Iterator[None]:
        self._prefix = f"[{number}/{total}] {step.name}: {step.plan}"
        self._started = time.monotonic()
        with self._console.status(escape(self._prefix)) as self._status:
            try:
                yield
            except BaseException:
                self._console.print(f"{escape(self._prefix)} [red]failed[/red]", highlight=False)
                raise
            finally:
                self._status = None
        spent = duration_text(time.monotonic() - self._started)
        self._console.print(f"{escape(self._prefix)} [green]done[/green] in {spent}", highlight=False)

    def line(self, text: str) -> None:
        if self._status is None:
            self._console.print(text, highlight=False, markup=False)
            return
        spent = duration_text(time.monotonic() - self._started)
        room = max(self._console.width - 16, 20)
        head = f"{self._prefix} ({spent})"[:room]
        rest = "".join(letter for letter in text if letter.isprintable())[: max(room - len(head), 0)]
        self._status.update(f"{escape(head)} [dim]{escape(rest)}[/dim]")


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


def size_text(mib: int) -> str:
    """MiB as people write sizes."""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB"


def duration_text(seconds: float) -> str:
    """Seconds as people write times."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
