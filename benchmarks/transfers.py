"""Large transfers through the public SDK against plain TCP between host and the same sandbox."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.results import Measured, compare_rates
from benchmarks.stage import Stage
from benchmarks.work import Work, more_since, work_so_far

__all__ = ["download", "growth", "stdout", "upload"]

SIZE_BYTES = 256 << 20
STDOUT_BYTES = 200_000_000
LINE_CHARACTERS = 99
_REMOTE = "/workspace/large"
_TEXT = "/workspace/text"


def upload(stage: Stage) -> Measured:
    """A file of the host into the sandbox's disk, by a stream; the bare bytes are thrown away there.

    Under a new name each time: a write over an old one waits for its blocks, so that a power cut leaves either.
    """
    source = _host_file(stage)

    def product() -> None:
        with source.open("rb") as file:
            stage.sandbox.files.write(_REMOTE, file)

    def remove() -> None:
        stage.sandbox.files.remove(_REMOTE)

    def bare() -> None:
        stage.raw.send(source, SIZE_BYTES)

    return _in_turns(stage, product, bare, size_bytes=SIZE_BYTES, after=remove)


def download(stage: Stage) -> Measured:
    """A file of the sandbox as a stream; the bare bytes come from its memory."""
    with _host_file(stage).open("rb") as file:
        stage.sandbox.files.write(_REMOTE, file)

    def product() -> None:
        _expect(sum(len(piece) for piece in stage.sandbox.files.open_read(_REMOTE)), SIZE_BYTES)

    return _in_turns(stage, product, lambda: stage.raw.receive(SIZE_BYTES), size_bytes=SIZE_BYTES)


def stdout(stage: Stage) -> Measured:
    """`cat` of lines of 100 bytes, each handed to a callback as text; the bare `cat` writes to a TCP socket.

    Beside it the same without a callback: then the client is sent only head and tail, the record gets all.
    """
    line = "x" * LINE_CHARACTERS
    stage.sandbox.exec(f"yes {line} | head -c {STDOUT_BYTES} > {_TEXT}", check=True)

    def product() -> None:
        lines = 0

        def count(text: str) -> None:
            nonlocal lines
            lines += 1

        stage.sandbox.exec(["cat", _TEXT], on_stdout=count, check=True)
        _expect(lines * (LINE_CHARACTERS + 1), STDOUT_BYTES)

    def silent() -> None:
        stage.sandbox.exec(["cat", _TEXT], check=True)

    def bare() -> None:
        stage.raw.cat(_TEXT, STDOUT_BYTES)

    return _in_turns(stage, product, bare, size_bytes=STDOUT_BYTES, beside={"without_callback": silent})


def growth(stage: Stage) -> Measured:
    """The most that a daemon grew over the transfers of this run; all three are made when none was."""
    if not stage.growth_mib:
        for transfer in (upload, download, stdout):
            transfer(stage)
    grown = {part: round(value, 1) for part, value in stage.growth_mib.items()}
    return Measured(value=max(grown.values()), spread=(min(grown.values()), max(grown.values())), detail=grown)


def _in_turns(
    stage: Stage,
    product: Callable[[], None],
    bare: Callable[[], None],
    *,
    size_bytes: int,
    after: Callable[[], None] = lambda: None,
    beside: Mapping[str, Callable[[], None]] = MappingProxyType({}),
) -> Measured:
    """Both in turns; `after` follows each turn of the product, untimed. What is `beside` is told as a ratio too, and
    of each the processor time of its parts."""
    assert stage.raw
    product()  # what is made once is made before
    after()
    bare()
    times: dict[str, list[float]] = {name: [] for name in ("product", "bare", *beside)}
    work: dict[str, list[Work]] = {name: [] for name in times}

    def take(name: str, call: Callable[[], None]) -> None:
        before = work_so_far(stage)
        times[name].append(_seconds(call))
        work[name].append(more_since(before, work_so_far(stage)))

    for _ in range(stage.rounds):
        with stage.watched():
            take("product", product)
        after()
        take("bare", bare)
        for name, other in beside.items():
            take(name, other)
    measured = compare_rates(times["product"], times["bare"], size_bytes=size_bytes)
    ratios = {name: round(statistics.median(times["bare"]) / statistics.median(times[name]), 2) for name in beside}
    spent = {f"{name}_work_s": _middle(rounds) for name, rounds in work.items()}
    return replace(measured, detail={**measured.detail, **ratios, **spent})


def _middle(rounds: list[Work]) -> Work:
    """Of each part, the median of its seconds."""
    return {part: round(statistics.median(one[part] for one in rounds), 3) for part in rounds[0]}


def _seconds(work: Callable[[], None]) -> float:
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def _host_file(stage: Stage) -> Path:
    path = stage.folder / "large"
    if not path.exists():
        piece = os.urandom(1 << 20)
        with path.open("wb") as file:
            for _ in range(SIZE_BYTES >> 20):
                file.write(piece)
    return path


def _expect(count: int, size_bytes: int) -> None:
    if count != size_bytes:
        raise RuntimeError(f"{count} bytes came of {size_bytes}")
