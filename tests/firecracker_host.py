"""A host that has Firecracker, as far as a driver can tell: a jailer that does what the real one's documentation says,
and behind it a program that answers its API, both run for real.

`tests/firecracker/` holds the two; the second is compiled once, static, since it runs in an empty root.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.microvm.runtime import MicrovmRuntime

__all__ = [
    "BOOT",
    "ID",
    "INSTANCE",
    "SOURCES",
    "Host",
    "driver_folder",
    "facts_of",
    "find_requests",
    "make_driver",
    "read",
    "requests_so_far",
    "traces",
]

# Of this process: several may test at a time.
ID, INSTANCE = f"{os.getpid():020d}", f"{os.getpid():06x}"
RATES = {"disk_mib_per_s": 200, "network_mib_per_s": 100, "network_packets_per_s": 5000}
BOOT = [
    "GET /version",
    "PUT /logger",
    "PUT /metrics",
    "PUT /machine-config",
    "PUT /boot-source",
    "PUT /drives/template",
    "PUT /drives/root",
    "PUT /drives/workspace",
    "PUT /network-interfaces/eth0",
    "PUT /entropy",
    "PUT /actions",
]

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


def make_driver(folder: Path, host: Host) -> MicrovmRuntime:
    for name in ("state", "run"):
        (folder / name).mkdir(exist_ok=True)
    own = {"state_dir": folder / "state", "run_dir": folder / "run"}
    return MicrovmRuntime(
        RuntimeHost(instance_id=INSTANCE, data_dir=folder / "data", **own, programs=host.programs, rates=RATES)
    )


def traces(folder: Path) -> list[str]:
    """All that a machine leaves on a host, and must not: folders, processes, groups, mounts."""
    found = [str(path) for path in (folder / "run").iterdir() if path.name != "probe"]
    found += [str(path) for path in (folder / "run" / "probe").glob("*")]
    found += [path for path in Path("/proc/self/mountinfo").read_text().split() if path.startswith(str(folder))]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words or f"--id\0{ID}" in words:
            found.append(words)
    return found + ControlGroups(INSTANCE).list()


def requests_so_far() -> list[str]:
    """What the machine was asked, if it is there."""
    found = []
    for pid in ControlGroups(INSTANCE).processes(ID):
        try:
            found += [what for what, _ in find_requests(pid)]
        except OSError:
            continue
    return found


def read(path: str | Path) -> str:
    return Path(path).read_text()


def facts_of(pid: int, name: str) -> dict[str, str]:
    return dict(line.split(":\t") for line in read(f"/proc/{pid}/{name}").splitlines() if ":\t" in line)


def driver_folder(spec: SandboxSpec) -> Path:
    return spec.disk.parent / "run" / spec.id


@functools.cache
def _compiled(version: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cpuos-fake-firecracker-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out, source = folder / "firecracker", SOURCES / "fake_firecracker.c"
    flags = ["-static", "-O1", "-Wall", "-Wno-format-truncation", f'-DVERSION="{version}"']
    subprocess.run(["gcc", *flags, "-o", str(out), str(source), "-lm"], check=True, capture_output=True)
    return out
