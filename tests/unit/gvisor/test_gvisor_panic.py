"""Only the kernel's own panic is told as one: a guest can bring gVisor to log other lines to the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuos.runtimes.gvisor.runtime import _panic

LINE = "I1130 04:10:18.213011       1 rate_limited.go:36] A process tried to create a raw socket: panic: fatal error:\n"


@pytest.mark.parametrize("text", ["", LINE, LINE * 500])
def test_other_lines_are_no_panic(tmp_path: Path, text: str) -> None:
    (tmp_path / "panic.log").write_text(text)
    assert _panic(tmp_path / "panic.log") == ""
    assert _panic(tmp_path / "none") == ""


@pytest.mark.parametrize(
    "start", ["panic: runtime error: index out of range", "fatal error: out of memory", "SIGSEGV: x"]
)
def test_a_panic_is_told_from_its_first_line(tmp_path: Path, start: str) -> None:
    (tmp_path / "panic.log").write_text(f"{LINE}{start}\ngoroutine 1 [running]:\n" + "x" * 9000)
    told = _panic(tmp_path / "panic.log")
    assert told.startswith(start)
    assert len(told) <= 2000
