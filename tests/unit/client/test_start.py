"""The body of a start: what needs no check goes without one, and is the same as with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpuos.client import _start
from cpuos.client._start import encode_start
from cpuos.errors import InvalidRequest

COMMANDS: list[Any] = ["true", "", "echo 'ü' | wc", ["true"], ["printf", "%s", "😀", ""], ["a"] * 3000]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("options", [{}, {"detach": True}, {"open_stdin": True, "detach": True}])
def test_both_ways_say_the_same(monkeypatch: pytest.MonkeyPatch, command: Any, options: dict[str, bool]) -> None:
    plain = encode_start(command, **options)
    monkeypatch.setattr(_start, "_encode_plain", lambda values: None)
    assert json.loads(plain) == json.loads(encode_start(command, **options))


@pytest.mark.parametrize("command", [[], "a\x00b", ["a", "b\x00"], ["\udc80"], ["x" * (1 << 20), "y"], [""] * 65537])
def test_what_is_wrong_is_refused(command: Any) -> None:
    with pytest.raises(InvalidRequest):
        encode_start(command)


@pytest.mark.parametrize("command", ["two\nlines", "a\ttab", ["x" * 5000]])
def test_what_is_looked_at_passes_too(command: Any) -> None:
    told = json.loads(encode_start(command))
    assert told == ({"command": command} if isinstance(command, str) else {"argv": command})
