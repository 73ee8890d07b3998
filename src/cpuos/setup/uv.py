"""uv: the one on the PATH, else the one that the Makefile's bootstrap put into the data directory."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.setup.host import Host

__all__ = ["find_uv", "install_uv", "uv_path"]


def find_uv(host: Host) -> Path | None:
    """A uv that runs, or None."""
    own = host.settings.data_dir / "bin" / "uv"
    for candidate in (os.environ.get("UV", ""), str(own), shutil.which("uv") or ""):
        if candidate and (host.read([candidate, "--version"]) or "").startswith("uv "):
            return Path(candidate)
    return None


def uv_path(host: Host) -> Path:
    """Like `find_uv`, but its absence is an error."""
    found = find_uv(host)
    if found is None:
        raise SetupRequired("cannot find uv", "it installs the Python packages", hint="cpuos doctor")
    return found


def install_uv(host: Host) -> None:
    """Unpack uv's wheel by pip; the binary goes into the data directory."""
    target = host.settings.cache_dir / "uv"
    shutil.rmtree(target, ignore_errors=True)
    host.run([_python_with_pip(host), "-m", "pip", "install", "--no-deps", "--target", target, "uv"], network=True)
    own = host.settings.data_dir / "bin" / "uv"
    own.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(target / "bin" / "uv", own)
    own.chmod(0o755)


def _python_with_pip(host: Host) -> str:
    candidates = (sys.executable, os.path.join(sysconfig.get_path("scripts"), "python3"), "/usr/bin/python3", "python3")
    for candidate in candidates:
        if host.read([candidate, "-m", "pip", "--version"]):
            return candidate
    host.run(["apt-get", "install", "--yes", "--no-install-recommends", "python3-pip"], network=True, contained=False)
    return "/usr/bin/python3"
