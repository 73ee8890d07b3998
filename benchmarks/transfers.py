"""Large transfers through the public SDK against plain TCP between host and the same sandbox."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import Measured, compare_rates
from benchmarks.stage import Stage

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
    """`cat` of lines of 100 bytes, each handed to a callback as text; the bare `cat` writes to a TCP socket."""
    line = "x" * LINE_CHARACTERS
    stage.sandbox.exec(f"yes {line} | head -c {STDOUT_BYTES} > {_TEXT}", check=True)

    def product() -> None:
        lines = 0

        def count(text: str) -> None:
            nonlocal lines
            lines += 1

        stage.sandbox.exec(["cat", _TEXT], on_stdout=count, check=True)
        _expect(lines * (LINE_CHARACTERS + 1), STDOUT_BYTES)

    return _in_turns(stage, product, lambda: stage.raw.cat(_TEXT, STDOUT_BYTES), size_bytes=STDOUT_BYTES)


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
) -> Measured:
    """Both in turns; `after` follows each turn of the product and is not timed."""
    assert stage.raw
    product()  # what is made once is made before
    after()
    bare()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(stage.rounds):
        since = time.perf_counter()
        with stage.watched():
            product()
        times[0].append(time.perf_counter() - since)
        after()
        since = time.perf_counter()
        bare()
        times[1].append(time.perf_counter() - since)
    return compare_rates(*times, size_bytes=size_bytes)


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
