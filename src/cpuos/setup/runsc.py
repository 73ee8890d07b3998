"""runsc at the pinned version, and its two sidecars beside it: built from the Go module proxy, checked by its sum."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib import resources
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.settings import RUNSC_VERSION
from cpuos.setup.golang import find_go, go_environment
from cpuos.setup.host import Host

__all__ = ["build_runsc", "build_sidecars", "runsc_is_current", "sidecars_are_current"]

_MODULE = "gvisor.dev/gvisor"
# Of the module zip; with its go.sum it pins every line of code that goes into the binaries.
_MODULE_SUM = "h1:AU5+CtCvnBnxdZRNcZt1NfSLqgkXZVT3N/u6u1aXg44="
_LINKER_FLAGS = f"-s -w -X gvisor.dev/gvisor/runsc/version.version={RUNSC_VERSION}"


def runsc_is_current(host: Host) -> bool:
    """Whether runsc is there, starts, and is of the pinned version."""
    return RUNSC_VERSION in (host.read([host.settings.runsc_path, "--version"]) or "")


def sidecars_are_current(host: Host) -> bool:
    """Whether both sidecars are there and were built from these sources."""
    folder = host.settings.runsc_path.parent / "gvisor-bin"
    try:
        built_from = (folder / "sources").read_text()
    except OSError:
        return False
    names = ("gvisor_sentry", "gvisor-sentry-prewarmer")
    return built_from == _sidecar_sources() and all(os.access(folder / name, os.X_OK) for name in names)


def build_runsc(host: Host) -> None:
    """Build runsc in the cache and move it into place."""
    work = _workspace(host)
    out = work / "runsc"
    _build(host, f"{_MODULE}/runsc", out=out, work=work)
    _install(out, host.settings.runsc_path)


def build_sidecars(host: Host) -> None:
    """Build both sidecars: a prewarmer without its sentry would start itself, so neither is installed alone."""
    work = _workspace(host)
    sources = resources.files("cpuos.runtimes.gvisor").joinpath("sidecars")
    (work / "sentry").mkdir(exist_ok=True)
    (work / "sentry" / "main.go").write_text(sources.joinpath("sentry.go").read_text())
    (work / "prewarmer.c").write_text(sources.joinpath("prewarmer.c").read_text())
    built = work / "gvisor-bin"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    _build(host, "./sentry", out=built / "gvisor_sentry", work=work)
    prewarmer = built / "gvisor-sentry-prewarmer"
    host.run(["gcc", "-O2", "-static", "-s", "-o", prewarmer, work / "prewarmer.c"])
    (built / "sources").write_text(_sidecar_sources())
    target = host.settings.runsc_path.parent / "gvisor-bin"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    built.replace(target)


def _workspace(host: Host) -> Path:
    """A Go module that requires gVisor at the pin with gVisor's own requirements."""
    work = host.settings.cache_dir / "gvisor" / RUNSC_VERSION
    work.mkdir(parents=True, exist_ok=True)
    # The first download may need several tries; what it prints is read from the cache afterwards.
    go, variables = _go_path(host), go_environment(host)
    host.run([go, "mod", "download", f"{_MODULE}@{RUNSC_VERSION}"], cwd=work, env=variables, network=True)
    listed = host.read([go, "mod", "download", "-json", f"{_MODULE}@{RUNSC_VERSION}"], env=variables, cwd=work)
    module = json.loads(listed or "{}")
    if module.get("Sum") != _MODULE_SUM:
        raise SetupRequired(
            f"cannot build runsc: {_MODULE} {RUNSC_VERSION} has the sum {module.get('Sum')}",
            f"expected {_MODULE_SUM}: what the module proxy gave is not what this release was made with",
            hint="env -u GOPROXY make setup",
        )
    source = Path(module["Dir"])
    requirements = (source / "go.mod").read_text().replace(f"module {_MODULE}", "module cpuos/gvisor", 1)
    (work / "go.mod").write_text(f"{requirements}\nrequire {_MODULE} {RUNSC_VERSION}\n")
    sums = f"{_MODULE} {RUNSC_VERSION} {module['Sum']}\n{_MODULE} {RUNSC_VERSION}/go.mod {module['GoModSum']}\n"
    (work / "go.sum").write_text((source / "go.sum").read_text() + sums)
    return work


def _build(host: Host, package: str, *, out: Path, work: Path) -> None:
    go, variables = _go_path(host), go_environment(host)
    # Listing what it needs downloads it; a compiler error after that is none of the network's.
    host.run(
        [go, "list", "-deps", "-f", "{{if .Error}}{{.Error}}{{end}}", package], cwd=work, env=variables, network=True
    )
    host.run([go, "build", "-trimpath", "-ldflags", _LINKER_FLAGS, "-o", out, package], cwd=work, env=variables)


def _go_path(host: Host) -> Path:
    found = find_go(host)
    if found is None:
        raise SetupRequired("cannot build runsc", "there is no Go of version 1.26.3 or newer", hint="make setup")
    return found


def _install(built: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copy(built, partial)
    partial.chmod(0o755)
    partial.replace(target)


def _sidecar_sources() -> str:
    folder = resources.files("cpuos.runtimes.gvisor").joinpath("sidecars")
    texts = [folder.joinpath(name).read_text() for name in ("sentry.go", "prewarmer.c")]
    return "\n".join([RUNSC_VERSION, platform.machine(), *texts])
