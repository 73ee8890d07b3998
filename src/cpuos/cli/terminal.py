"""Guest text on the operator's terminal: the one place that decides what may reach it.

A sandbox chooses its output, file names and labels, so each of them may hold control sequences that retitle the window,
fill the clipboard or repaint lines above. `safe_text` is for whole texts, `SafeStream` the same decision for a stream.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import BinaryIO

__all__ = ["Keep", "SafeStream", "raw_mode", "safe_text", "terminal_size"]


class Keep(Enum):
    """How much of a text's control codes survives."""

    NOTHING = "nothing"
    """One line of plain text: names, labels, table cells, error lines."""
    COLOURS = "colours"
    """Line ends, tabs, carriage returns and colours: the output of a command."""
    SCREEN = "screen"
    """All that draws; for a pty that the user asked for. Clipboard, title and other string sequences are dropped."""


# Controls, C1 (an 8-bit CSI is U+009B), line separators, direction overrides, invisible tags, lone surrogates.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
_CSI = re.compile(r"\x1b\[([0-?]*)([ -/]*)([@-~])")
_CSI_PREFIX = re.compile(r"\x1b(\[[0-?]*[ -/]*)?\Z")
_OTHER_ESCAPE = re.compile(r"\x1b[ -/]*[0-~]")
_OTHER_PREFIX = re.compile(r"\x1b[ -/]*\Z")
_STRING_START = re.compile(r"\x1b[\]PX^_]")
_STRING_END = re.compile(r"\x07|\x1b\\|\x9c")
_COLOUR_PARAMETERS = re.compile(r"[0-9;:]*\Z")
_MAX_SEQUENCE = 64
# Ends of what a full-screen program may have left on: colours, hidden cursor, mouse reports, bracketed paste, keypad.
_SCREEN_RESET = "\x1b[0m\x1b[?25h\x1b[?1000;1002;1003;1006l\x1b[?2004l\x1b[?1l\x1b>"


def safe_text(text: str, *, keep: Keep = Keep.NOTHING) -> str:
    """The text with every control code that `keep` does not name shown as a visible escape, such as `\\x1b`."""
    if keep is Keep.NOTHING:
        return _CONTROL.sub(_visible, text)
    stream = SafeStream(keep)
    return stream.feed_text(text) + stream.close()


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x0A:
        return "\\n"
    if code == 0x09:
        return "\\t"
    if code == 0x0D:
        return "\\r"
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class SafeStream:
    """Makes a stream safe piece by piece: sequences and characters split over pieces are put together first."""

    def __init__(self, keep: Keep = Keep.COLOURS) -> None:
        self._keep = keep
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._in_string = False
        self._coloured = False
        self._alternate_screen = False

    def feed(self, data: bytes) -> str:
        return self.feed_text(self._decoder.decode(data))

    def feed_text(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        return "".join(self._pieces(text))

    def close(self) -> str:
        """What was held, made visible, and the end of colours and modes that the stream left on."""
        rest = self.feed_text(self._decoder.decode(b"", final=True))
        if not self._in_string:
            rest += _CONTROL.sub(_visible, self._held)
        self._held = ""
        if self._keep is Keep.SCREEN:
            return rest + ("\x1b[?1049l" if self._alternate_screen else "") + _SCREEN_RESET
        return rest + ("\x1b[0m" if self._coloured else "")

    def _pieces(self, text: str) -> Iterator[str]:
        position = 0
        while position < len(text):
            if self._in_string:
                end = _STRING_END.search(text, position)
                if end is None:
                    # A string terminator may be cut between its two characters.
                    self._held = "\x1b" if text.endswith("\x1b") else ""
                    return
                self._in_string = False
                position = end.end()
                continue
            control = _CONTROL.search(text, position)
            if control is None:
                yield text[position:]
                return
            yield text[position : control.start()]
            position = control.start()
            if control[0] == "\x1b" and self._keep is not Keep.NOTHING:
                if self._is_cut(text, position):
                    self._held = text[position:]
                    return
                piece, position = self._escape(text, position)
                yield piece
            else:
                yield self._single(control)
                position = control.end()

    def _is_cut(self, text: str, position: int) -> bool:
        if len(text) - position > _MAX_SEQUENCE:
            return False
        return bool(_CSI_PREFIX.match(text, position) or _OTHER_PREFIX.match(text, position))

    def _escape(self, text: str, position: int) -> tuple[str, int]:
        screen = self._keep is Keep.SCREEN
        if csi := _CSI.match(text, position):
            parameters, between, final = csi.groups()
            if final == "m" and not between and _COLOUR_PARAMETERS.match(parameters):
                self._coloured = parameters.strip("0;") != ""
                return csi[0], csi.end()
            if screen and final == "t":  # window operations, among them "report the title"
                return "", csi.end()
            if screen:
                if parameters in ("?1049", "?47", "?1047"):
                    self._alternate_screen = final == "h"
                return csi[0], csi.end()
        elif screen and (start := _STRING_START.match(text, position)):
            self._in_string = True
            return "", start.end()
        elif screen and (other := _OTHER_ESCAPE.match(text, position)):
            return other[0], other.end()
        return ("" if screen else "\\x1b"), position + 1

    def _single(self, control: re.Match[str]) -> str:
        if control[0] in "\n\t\r":
            return _visible(control) if self._keep is Keep.NOTHING else control[0]
        if self._keep is Keep.SCREEN:
            return control[0] if control[0] in "\x07\x08\x0b\x0c\x0e\x0f" else ""
        return _visible(control)


@contextmanager
def raw_mode(stream: BinaryIO) -> Iterator[None]:
    """The terminal in raw mode (keys go to the program, not to signals), restored whatever happens."""
    import termios
    import tty

    descriptor = stream.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        # TCSAFLUSH also throws away answers that a program inside asked the terminal for, lest our shell reads them.
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


def terminal_size() -> tuple[int, int]:
    """Columns and rows of the user's terminal; 80 by 24 where there is none."""
    for stream in (sys.stdout, sys.stdin, sys.stderr):
        try:
            size = os.get_terminal_size(stream.fileno())
        except (OSError, ValueError, AttributeError):
            continue
        if size.columns and size.lines:
            return min(size.columns, 1000), min(size.lines, 1000)
    return 80, 24
