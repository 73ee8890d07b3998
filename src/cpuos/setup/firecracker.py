"""Firecracker and its jailer, of one official release: from its archive, here or at its makers', checked by its sum."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import tarfile
import urllib.request
from functools import partial
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.setup.engine import Step
from cpuos.setup.host import Host

__all__ = ["DOWNLOAD", "RELEASE", "firecracker_is_current", "firecracker_step", "install_firecracker"]

RELEASE = "1.15.1"
DOWNLOAD = "release"
"""In the place of an archive: the one of this release, from its makers."""
_ARCHIVE = f"firecracker-v{RELEASE}-x86_64.tgz"
_URL = f"https://github.com/firecracker-microvm/firecracker/releases/download/v{RELEASE}/{_ARCHIVE}"
_SUM = "d4a32ab2322d887ca1bc4a4e7afa9cc35393e6362dfc2b3becb389d362e4275a"
_MAX_BYTES = 64 << 20
_TIMEOUT_S = 60.0


def firecracker_step(archive: str) -> Step:
    """`archive`: DOWNLOAD, or where it lies."""
    return Step(
        name="firecracker",
        plan=f"installs Firecracker {RELEASE} and its jailer",
        is_done=firecracker_is_current,
        run=partial(install_firecracker, archive=archive),
        download_mib=4 if archive == DOWNLOAD else 0,
        disk_mib=8,
        duration_s=5,
    )


def firecracker_is_current(host: Host) -> bool:
    """Whether both programs are there and say that they are of this release."""
    folder = host.settings.data_dir / "bin" / "firecracker"
    return all(f"v{RELEASE}\n" in (host.read([folder / name, "--version"]) or "") for name in ("firecracker", "jailer"))


def install_firecracker(host: Host, *, archive: str) -> None:
    """Unpack the two programs; nothing else of the archive is looked at, and none of it before its sum is right."""
    data = _download() if archive == DOWNLOAD else _read(Path(archive))
    found = hashlib.sha256(data).hexdigest()
    if found != _SUM:
        raise SetupRequired(
            f"cannot install Firecracker: {archive} has the sum {found}",
            f"expected {_SUM}, of {_ARCHIVE}",
            hint="cpuos setup microvm --help",
        )
    folder = host.settings.data_dir / "bin" / "firecracker"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as unpacked:
        for name in ("jailer", "firecracker"):
            _install(unpacked, f"release-v{RELEASE}-x86_64/{name}-v{RELEASE}-x86_64", folder / name)
    if not firecracker_is_current(host):
        raise SetupRequired("cannot install Firecracker", f"what is in {folder} does not start here")


def _install(archive: tarfile.TarFile, member: str, target: Path) -> None:
    try:
        source = archive.extractfile(member)
    except KeyError:
        source = None
    if source is None:
        raise SetupRequired("cannot install Firecracker", f"its archive has no {member}")
    partial_target = target.with_name(f".{target.name}.partial")
    with source:
        partial_target.write_bytes(source.read())
    os.chown(partial_target, 0, 0)
    partial_target.chmod(0o755)
    partial_target.replace(target)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as problem:
        raise SetupRequired(f"cannot read {path}", problem.strerror or str(problem)) from problem


def _download() -> bytes:
    try:
        with urllib.request.urlopen(_URL, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read(_MAX_BYTES))
    except (OSError, http.client.HTTPException) as problem:
        raise SetupRequired(
            "cannot download Firecracker",
            f"{_URL}: {problem}",
            hint=f"cpuos setup microvm --firecracker {_ARCHIVE}",
        ) from problem
