"""The arithmetic of recorded streams: head, ring, dropped bytes, and what a crash leaves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpuos.errors import OutputLost
from cpuos.gateway import spool
from cpuos.gateway.spool import SpoolLimits, StreamFile


@pytest.fixture(autouse=True, scope="module")
def small_slack() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "RING_SLACK", 16)
        patch.setattr(spool, "SMALLEST_RING", 8)
        yield


@contextmanager
def stream_at(head: int, tail: int) -> Iterator[tuple[StreamFile, Path, SpoolLimits]]:
    limits = SpoolLimits(head_bytes=head, tail_bytes=tail)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stdout"
        stream = StreamFile(path, limits=limits)
        try:
            yield stream, path, limits
        finally:
            stream.close()


def pattern(start: int, length: int) -> bytes:
    return bytes((start + index) % 251 for index in range(length))


def everything(stream: StreamFile, *, step: int = 1000) -> tuple[bytes, bytes]:
    """What is before the gap, and what is behind it."""
    parts = []
    gap = stream.gap
    for start, end in [(0, stream.total)] if gap is None else [(0, gap[0]), (gap[1], stream.total)]:
        data = b""
        while start + len(data) < end:
            piece = stream.read(start + len(data), min(step, end - start - len(data)))
            assert piece
            data += piece
        parts.append(data)
    return parts[0], parts[1] if gap else b""


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    head=st.integers(1, 60),
    tail=st.integers(1, 60),
    writes=st.lists(st.integers(0, 90), max_size=12),
    step=st.integers(1, 50),
)
def test_head_and_tail_are_right_and_the_dropped_bytes_exact(
    head: int, tail: int, writes: list[int], step: int
) -> None:
    with stream_at(head, tail) as (stream, path, limits):
        total = 0
        for size in writes:
            stream.write(pattern(total, size))
            total += size
        assert stream.total == total
        assert stream.dropped == max(0, total - head - tail)
        first, last = everything(stream, step=step)
        if stream.gap is None:
            assert first == pattern(0, total)
        else:
            assert stream.gap == (head, total - tail)
            assert first == pattern(0, head)
            assert last == pattern(total - tail, tail)
            with pytest.raises(OutputLost):
                stream.read(stream.gap[0], 1)
        if path.exists():
            assert path.stat().st_size <= head + tail + 16
        again = StreamFile(path, limits=limits)
        assert (again.total, again.gap) == (stream.total, stream.gap)
        assert everything(again) == (first, last)
        again.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    head=st.integers(1, 40),
    tail=st.integers(1, 40),
    writes=st.lists(st.integers(1, 60), min_size=1, max_size=10),
    torn=st.integers(1, 16),
)
def test_a_write_cut_short_by_a_crash_spoils_nothing_that_counts(
    head: int, tail: int, writes: list[int], torn: int
) -> None:
    with stream_at(head, tail) as (stream, path, limits):
        for size in writes:
            stream.write(pattern(stream.total, size))
        total, before = stream.total, everything(stream)
        # The crash: data of the next piece reached the file, the side file did not.
        if total >= head:
            for index in range(torn):
                place, _ = stream._place(total + index)
                os.pwrite(stream._opened(), b"\xff", place)
        stream.close()
        again = StreamFile(path, limits=limits)
        if total > head:
            assert again.total == total
            assert everything(again) == before
        # The agent sends again from where the record ends.
        again.write(pattern(again.total, 30))
        last = everything(again)[1]
        assert last == b"" or last == pattern(again.total - len(last), len(last))
        again.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    head=st.integers(1, 60),
    tail=st.integers(1, 80),
    before=st.lists(st.integers(0, 60), max_size=6),
    after=st.lists(st.integers(0, 60), max_size=6),
)
def test_a_frozen_stream_stays_readable_and_small(head: int, tail: int, before: list[int], after: list[int]) -> None:
    with stream_at(head, tail) as (stream, path, limits):
        for size in before:
            stream.write(pattern(stream.total, size))
        stream.freeze()
        frozen = max(stream.total, head) if stream.total > head else stream.total
        for size in after:
            stream.write(pattern(stream.total, size))
            stream.freeze()
        first, last = everything(stream)
        assert first == pattern(0, len(first))
        assert last == pattern(stream.total - len(last), len(last))
        assert len(first) + len(last) + stream.dropped == stream.total
        if path.exists():
            assert path.stat().st_size <= frozen + 16 + max(8, tail if stream.total > head else 8) + 8
        again = StreamFile(path, limits=limits)
        assert everything(again) == (first, last)
        again.close()


def test_a_full_disk_counts_nothing_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with stream_at(100, 100) as (stream, _, _):
        stream.write(b"abc")
        real = os.pwrite

        def full(*arguments: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            stream.write(b"def")
        assert stream.total == 3
        monkeypatch.setattr(os, "pwrite", real)
        stream.write(b"def")
        assert stream.read(0, 10) == b"abcdef"


def test_removed_output_keeps_its_count() -> None:
    with stream_at(100, 100) as (stream, path, _):
        stream.write(b"abc")
        stream.remove(total=3)
        assert not path.exists()
        assert (stream.total, stream.dropped, stream.gap, stream.stored) == (3, 3, (0, 3), 0)
        with pytest.raises(OutputLost):
            stream.read(0, 1)
