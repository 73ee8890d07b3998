"""What a process really costs."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["pss_mib", "resident_mib"]


def resident_mib(pid: int) -> float:
    """Anonymous resident memory of a process: page cache and shared code are not its growth."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(match.group(1)) / 1024 if match else 0.0


def pss_mib(pid: int) -> float:
    """Proportional set size: shared pages are split among the processes that map them."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(match.group(1)) / 1024 if match else 0.0
