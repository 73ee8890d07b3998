"""A host that has Firecracker, as far as a driver can tell: a jailer that does what the real one's documentation says,
and behind it a program that answers its API, both run for real.

`tests/firecracker/` holds the two; the second is compiled once, static, since it runs in an empty root.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["SOURCES", "Host", "find_requests"]

SOURCES = Path(__file__).parent / "firecracker"


class Host:
    """Its programs in a folder, and what the VMM does where it does not as it should."""

    def __init__(self, folder: Path, *, version: str = "1.15.1", jailer_version: str = "1.15.1") -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.program, self.jailer = folder / "firecracker", folder / "jailer"
        shutil.copy(_compiled(version), self.program)
        text = (SOURCES / "fake_jailer.py").read_text()
        self.jailer.write_text(text.replace('VERSION = "1.15.1"', f'VERSION = "{jailer_version}"'))
        self.jailer.chmod(0o755)
        self.misbehave()

    def misbehave(self, *lines: str) -> None:
        """`METHOD PATH<tab>ACTION` each; of none it behaves."""
        (self.folder / "script").write_text("".join(f"{line}\n" for line in lines))

    @property
    def programs(self) -> dict[str, Path]:
        return {"firecracker": self.program, "jailer": self.jailer}


def find_requests(pid: int) -> list[tuple[str, object]]:
    """What a VMM was asked, in order: `METHOD PATH`, and the body."""
    found = []
    for line in Path(f"/proc/{pid}/root/requests").read_text().splitlines():
        what, _, body = line.partition("\t")
        found.append((what, json.loads(body) if body else None))
    return found


@functools.cache
def _compiled(version: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cpuos-fake-firecracker-"))
    out, source = folder / "firecracker", SOURCES / "fake_firecracker.c"
    flags = ["-static", "-O1", "-Wall", "-Wno-format-truncation", f'-DVERSION="{version}"']
    subprocess.run(["gcc", *flags, "-o", str(out), str(source), "-lm"], check=True, capture_output=True)
    return out
