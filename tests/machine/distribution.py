"""The distributions that a machine of its own is made of: their packages, from the mirrors that this machine asks."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from cpuos.settings import Settings
from cpuos.setup.apt_sources import Source, distribution_sources
from cpuos.setup.packages import SYSTEM_PACKAGES

__all__ = ["BOOKWORM", "NOBLE", "TRIXIE", "UBUNTU_MIRROR", "Release", "base", "cache", "find_sources", "run"]

UBUNTU_MIRROR = "CPUOS_TEST_UBUNTU_MIRROR"
"""The variable that names a mirror of Ubuntu to a machine that runs another distribution."""
_UBUNTU_KEYRING = "/usr/share/keyrings/ubuntu-archive-keyring.gpg"
_PACKAGES = ("systemd-sysv", "udev", "kmod", "initramfs-tools", "make", "sudo", "qemu-system-x86", *SYSTEM_PACKAGES)


@dataclass(frozen=True, kw_only=True)
class Release:
    name: str
    distribution: str
    kernel: str
    """Package that brings a kernel for virtual machines."""
    components: tuple[str, ...] = ("main",)


BOOKWORM = Release(name="bookworm", distribution="debian", kernel="linux-image-cloud-amd64")
TRIXIE = Release(name="trixie", distribution="debian", kernel="linux-image-cloud-amd64")
NOBLE = Release(name="noble", distribution="ubuntu", kernel="linux-image-virtual", components=("main", "universe"))


def find_sources(release: Release, *, etc: Path = Path("/etc/apt")) -> list[Source]:
    """Where its packages are to be had: this machine's own apt sources, as they are or for the other release; else the
    mirror that was named. Empty: nowhere."""
    if own := distribution_sources(release.name, etc=etc):
        return own
    here = platform.freedesktop_os_release()
    if here.get("ID") == release.distribution:
        old = here["VERSION_CODENAME"]
        return [
            replace(source, suites=tuple(suite.replace(old, release.name) for suite in source.suites))
            for source in distribution_sources(old, etc=etc)
        ]
    mirror = os.environ.get(UBUNTU_MIRROR, "")
    if mirror and release.distribution == "ubuntu":
        suites = tuple(f"{release.name}{part}" for part in ("", "-updates", "-security"))
        return [Source(uris=(mirror,), suites=suites, components=release.components, signed_by=_UBUNTU_KEYRING)]
    return []


def base(settings: Settings, release: Release) -> Path:
    """Its root directory with a kernel, a service manager and what set-up installs; made once, kept in the cache."""
    packages, sources = [*_PACKAGES, release.kernel], [str(source) for source in find_sources(release)]
    name = hashlib.sha256(" ".join([*sorted(packages), *sources]).encode()).hexdigest()[:12]
    kept = cache(settings) / f"{release.name}-{name}"
    if not kept.exists():
        for old in cache(settings).glob(f"{release.name}-*"):
            shutil.rmtree(old)
        building = kept.with_name(f"{kept.name}.building")
        building.parent.mkdir(parents=True, exist_ok=True)
        listed = building.with_suffix(".sources")
        listed.write_text("\n".join(sources))
        argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", '--aptopt=Acquire::Retries "5"']
        argv += [f"--components={','.join(release.components)}", f"--include={','.join(packages)}"]
        run(*argv, release.name, building, listed)
        listed.unlink()
        building.rename(kept)
    return kept


def cache(settings: Settings) -> Path:
    return settings.cache_dir / "test-machine"


def run(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words[0]}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
