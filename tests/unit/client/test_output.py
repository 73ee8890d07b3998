"""Whole lines, and head and tail with exact counts, however the bytes are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cpuos.client._output import HeadTail, LineSplitter, decode_kept

PIECES = st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=10).map(str.encode)), max_size=12)


@given(PIECES)
def test_lines_do_not_depend_on_the_cuts(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)] + splitter.flush()
    text = b"".join(pieces).decode("utf-8", "replace")
    expected = text.split("\n")
    if expected[-1] == "":
        expected.pop()
    assert lines == expected


def test_a_line_without_end_comes_in_parts() -> None:
    splitter = LineSplitter(max_line=10)
    parts = [line for _ in range(5) for line in splitter.feed(b"abcdef")] + splitter.flush()
    assert "".join(parts) == "abcdef" * 5
    assert max(map(len, parts)) < 20


@given(PIECES, st.integers(0, 64))
def test_kept_and_dropped_add_up(pieces: list[bytes], limit: int) -> None:
    collector = HeadTail(limit)
    for piece in pieces:
        collector.feed(piece)
    data = b"".join(pieces)
    kept = collector.kept()
    assert len(kept.head) + kept.dropped + len(kept.tail) == len(data)
    assert len(kept.head) + len(kept.tail) <= limit
    assert data.startswith(kept.head)
    assert data.endswith(kept.tail)
    assert limit - len(kept.head) - len(kept.tail) <= 6 or not kept.dropped
    if len(data) <= limit:
        assert (kept.dropped, kept.head + kept.tail) == (0, data)


@given(st.text(min_size=30, max_size=200), st.integers(8, 64))
def test_no_character_is_broken(text: str, limit: int) -> None:
    collector = HeadTail(limit)
    collector.feed(text.encode())
    assert (
        "\ufffd" not in decode_kept(collector.kept()).replace("\ufffd" * text.count("\ufffd"), "") or "\ufffd" in text
    )


@given(st.binary(max_size=50), st.integers(1, 1000), st.binary(max_size=50), st.integers(2, 64))
def test_bytes_lost_on_the_way_are_counted(before: bytes, lost: int, after: bytes, limit: int) -> None:
    collector = HeadTail(limit)
    collector.feed(before)
    collector.skip_to(len(before) + lost)
    collector.feed(after)
    kept = collector.kept()
    assert len(kept.head) + kept.dropped + len(kept.tail) == len(before) + lost + len(after)
    assert before.startswith(kept.head)
    assert after.endswith(kept.tail)
    assert kept.dropped >= lost
