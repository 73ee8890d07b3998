"""The one runsc version that the control-socket client, the spec and the flags are written against."""

from __future__ import annotations

import mmap
from pathlib import Path

from cpuos.settings import RUNSC_VERSION

__all__ = ["RUNSC_VERSION", "has_pinned_version"]

# A Go program carries the versions of its modules as tab-separated lines (debug/buildinfo); one built by `go install`
# has no other mark of its version.
_MARK = f"gvisor.dev/gvisor\t{RUNSC_VERSION}\t".encode()


def has_pinned_version(program: Path) -> bool:
    """Whether this program was built from the pinned gVisor module."""
    with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(_MARK) >= 0
