"""What the user sees: data on stdout (JSON when asked), progress and errors on stderr."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer

from cpuos.cli.hints import hint_of
from cpuos.cli.terminal import Keep, safe_text
from cpuos.errors import CpuosError
from cpuos.live import Work, drawn, told

T = TypeVar("T")

__all__ = ["JsonOption", "Output", "ago", "current_output", "in_future"]

_SAID_TWICE = re.compile(r"^cannot [a-z]+ (/.*): ([^:]+)$")
"""The agent says again what could not be done, in the words of system calls: its path and reason are what is new."""


class Output:
    """One a run of the command; lies in the context, so that `--json` also shapes errors."""

    def __init__(self) -> None:
        self.json = False
        self.interrupted = "interrupted"
        """What Ctrl-C leaves behind, in words."""

    def data(self, value: Any) -> None:
        """A value for programs: one JSON document on stdout."""
        print(json.dumps(value, ensure_ascii=True, default=_encode, indent=None if not sys.stdout.isatty() else 2))

    def line(self, text: str) -> None:
        """One line of data."""
        print(safe_text(text))

    def text(self, text: str) -> None:
        """Several lines of data."""
        print(safe_text(text, keep=Keep.COLOURS), end="" if text.endswith("\n") else "\n")

    def progress(self, text: str) -> None:
        """What is going on; never data."""
        print(safe_text(text), file=sys.stderr, flush=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str = "") -> None:
        """Columns for people. Where stdout is no terminal lines are never folded or cut."""
        if not rows and empty:
            self.progress(empty)
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*[Text(safe_text("-" if cell is None or cell == "" else str(cell))) for cell in row])
        with console.capture() as capture:
            console.print(table)
        print("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def listing(
        self, name: str, values: Sequence[T], headings: Sequence[str], row: Callable[[T], Sequence[Any]], *, empty: str
    ) -> None:
        """Things of one kind, a line each; with --json under this name."""
        if self.json:
            self.data({name: values})
        else:
            self.table(headings, [row(value) for value in values], empty=empty)

    def fields(self, value: Any, rows: Sequence[tuple[str, Any]]) -> None:
        """One thing, a field a line; with --json itself."""
        if self.json:
            self.data(value)
        else:
            self.table(("FIELD", "VALUE"), rows)

    def removed(self, names: Sequence[str], remove: Callable[[str], object]) -> None:
        """Remove one after the other, and tell of each at once."""
        for name in names:
            remove(name)
            if not self.json:
                self.line(name)
        if self.json:
            self.data({"removed": names})

    @contextmanager
    def working(self, text: str) -> Iterator[Work]:
        """A spinner on stderr where that is a terminal, with the time from 5 s on; elsewhere a line each 15 s."""
        work = Work(safe_text(text))
        if not sys.stderr.isatty():
            with told(work, sys.stderr):
                yield work
            return
        from rich.console import Console

        with drawn(work, Console(stderr=True)):
            yield work

    def error(self, error: CpuosError, arguments: Sequence[str] = ()) -> None:
        """The three lines on stderr, of a run with these arguments; with --json the body, as the API sends it, on
        stdout too."""
        error.hint = hint_of(error, arguments)
        error.why = _SAID_TWICE.sub(r"\1: \2", error.why)
        if self.json:
            self.data(error.body())
        lines = [safe_text(line) for line in str(error).split("\n")]
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
            lines[0] = f"\x1b[31m{lines[0]}\x1b[0m"
        print("\n".join(lines), file=sys.stderr, flush=True)


def current_output(ctx: typer.Context) -> Output:
    return ctx.ensure_object(Output)


def _set_json(ctx: typer.Context, value: bool) -> bool:
    if value:
        current_output(ctx).json = True
    return value


JsonOption = Annotated[
    bool, typer.Option("--json", callback=_set_json, is_eager=True, help="Write one JSON document to stdout.")
]


def _encode(value: Any) -> Any:
    """JSON of wire types and plain values."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def ago(moment: datetime | None) -> str:
    """Age in one unit: "12s", "4m", "3h", "2d"."""
    return "" if moment is None else _span((datetime.now(UTC) - moment).total_seconds())


def in_future(moment: datetime | None) -> str:
    """Time until then, rounded up: what was just made for 15 minutes ends in "15m"."""
    return "" if moment is None else _span((moment - datetime.now(UTC)).total_seconds(), up=True)


def _span(seconds: float, *, up: bool = False) -> str:
    seconds = max(0, math.ceil(seconds) if up else int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size * 2:
            return f"{-(-seconds // size) if up else seconds // size}{unit}"
    return f"{seconds}s"
