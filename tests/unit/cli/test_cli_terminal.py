"""Guest text on a terminal: nothing it holds may act on the operator's side."""

from __future__ import annotations

import os
import pty
import re
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.cli.terminal import Keep, SafeStream, raw_mode, safe_text, terminal_size

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "title with ST": "\x1b]2;owned\x1b\\",
    "clipboard": "\x1b]52;c;cm0gLXJmIC8K\x07",
    "hyperlink": "\x1b]8;;http://evil.test\x1b\\click\x1b]8;;\x1b\\",
    "8-bit string": "\x9d0;owned\x9c",
    "device control": "\x1bP$qm\x1b\\",
    "report title": "\x1b[21t",
    "application command": "\x1b_payload\x1b\\",
    "privacy message": "\x1b^payload\x1b\\",
    "answer back": "\x05",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("keep", [Keep.NOTHING, Keep.COLOURS])
def test_sequences_are_shown_not_sent(text: str, keep: Keep) -> None:
    shown = safe_text(f"a{text}b", keep=keep)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert shown.startswith("a")
    assert shown.endswith("b")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_screen_keeps_drawing_and_drops_the_rest(text: str) -> None:
    stream = SafeStream(Keep.SCREEN)
    assert stream.feed_text(f"\x1b[2J\x1b[1;1Ha{text}b") in (
        "\x1b[2J\x1b[1;1Hab",
        "\x1b[2J\x1b[1;1Haclickb",
        "\x1b[2J\x1b[1;1Ha0;ownedb",
    )


def test_names_stay_on_one_line() -> None:
    assert safe_text("new\nline\ttab\rback") == "new\\nline\\ttab\\rback"
    assert safe_text("ok 报告 🤣 é") == "ok 报告 🤣 é"
    assert safe_text(os.fsdecode(b"caf\xe9.txt")) == "caf\\xe9.txt"
    assert safe_text("evil\u202etxt.exe") == "evil\\u202etxt.exe"
    assert safe_text("tag\U000e0041") == "tag\\U000e0041"


def test_output_keeps_lines_and_colours() -> None:
    assert safe_text("\x1b[31mred\x1b[0m\n", keep=Keep.COLOURS) == "\x1b[31mred\x1b[0m\n"
    assert safe_text("50%\r100%\n", keep=Keep.COLOURS) == "50%\r100%\n"
    assert safe_text("\x1b[2Jgone", keep=Keep.COLOURS) == "\\x1b[2Jgone"
    assert safe_text("\x1b[31mred", keep=Keep.COLOURS) == "\x1b[31mred\x1b[0m", "colours end with the text"
    assert safe_text("\x1b[?25m", keep=Keep.COLOURS) == "\\x1b[?25m"


def test_what_is_split_is_put_together() -> None:
    whole = "é\x1b[1;32mgrün\x1b[0m\x1b]0;t\x07 ende".encode()
    for keep in Keep:
        one = SafeStream(keep)
        expected = one.feed(whole) + one.close()
        for size in (1, 2, 3, 5):
            stream = SafeStream(keep)
            pieces = [stream.feed(whole[i : i + size]) for i in range(0, len(whole), size)]
            assert "".join(pieces) + stream.close() == expected


def test_an_endless_sequence_is_not_held_for_ever() -> None:
    stream = SafeStream(Keep.COLOURS)
    shown = "".join(stream.feed(b"\x1b[" + b"1;" * 40) for _ in range(3))
    assert shown.startswith("\\x1b[1;")
    screen = SafeStream(Keep.SCREEN)
    assert screen.feed(b"\x1b]0;") + screen.feed(b"x" * 10_000) == ""
    assert len(screen._held) <= 1


def test_a_screen_is_left_as_it_was_found() -> None:
    stream = SafeStream(Keep.SCREEN)
    assert stream.feed_text("\x1b[?1049h\x1b[?25l") == "\x1b[?1049h\x1b[?25l"
    end = stream.close()
    assert "\x1b[?1049l" in end
    assert "\x1b[?25h" in end
    plain = SafeStream(Keep.SCREEN)
    plain.feed_text("hello")
    assert "1049" not in plain.close()


@given(st.text(), st.sampled_from([Keep.NOTHING, Keep.COLOURS]))
def test_no_text_escapes(text: str, keep: Keep) -> None:
    shown = safe_text(text, keep=keep)
    without_colours = re.sub(r"\x1b\[[0-9;:]*m", "", shown) if keep is Keep.COLOURS else shown
    allowed = "\n\t\r" if keep is Keep.COLOURS else ""
    assert not [c for c in without_colours if (ord(c) < 32 and c not in allowed) or 0x7F <= ord(c) < 0xA0]
    shown.encode()


@given(st.binary(), st.integers(1, 7))
def test_pieces_do_not_matter(data: bytes, size: int) -> None:
    whole, pieces = SafeStream(Keep.COLOURS), SafeStream(Keep.COLOURS)
    expected = whole.feed(data) + whole.close()
    assert "".join(pieces.feed(data[i : i + size]) for i in range(0, len(data), size)) + pieces.close() == expected


def test_raw_mode_is_always_taken_back() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "rb", buffering=0) as stream, os.fdopen(ours, "rb", buffering=0):
        before = termios.tcgetattr(stream.fileno())
        with pytest.raises(ZeroDivisionError), raw_mode(stream):  # noqa: PT012
            assert termios.tcgetattr(stream.fileno()) != before
            raise ZeroDivisionError
        assert termios.tcgetattr(stream.fileno()) == before


def test_size_without_a_terminal() -> None:
    columns, rows = terminal_size()
    assert columns > 0
    assert rows > 0
