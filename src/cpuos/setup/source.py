"""The package that the daemons run from: this clone, installed into an environment that their users can read."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
from pathlib import Path

import cpuos
from cpuos.errors import SetupRequired
from cpuos.settings import DEFAULT_RUN_DIR, Settings
from cpuos.setup.host import Host
from cpuos.setup.uv import uv_path

__all__ = [
    "LINK",
    "command_lines",
    "environment_is_current",
    "environment_path",
    "install_environment",
    "is_own_command",
    "link_command",
    "readable_python",
    "source_hash",
    "source_tree",
]

LINK = Path("/usr/local/bin/cpuos")
"""The command of this machine's own instance."""
_KEPT_ENVIRONMENTS = 3


def source_tree() -> Path | None:
    """The clone this code runs from; None when it runs from an installed package."""
    tree = Path(cpuos.__file__).resolve().parents[2]
    return tree if (tree / "pyproject.toml").is_file() and (tree / "guest").is_dir() else None


def environment_path(settings: Settings) -> Path:
    """The environment for exactly this code: one a version of the source, so that running daemons keep theirs."""
    tree = source_tree()
    if tree is None:
        return Path(sys.prefix)
    return settings.venv_dir / source_hash(tree)


def environment_is_current(host: Host) -> bool:
    """Whether the environment for this code, as it was when set-up began, is complete and the current one."""
    environment = host.environment
    if environment == Path(sys.prefix):
        return True
    return (environment / "complete").is_file() and _leads_to(host.settings.venv_dir / "current", environment)


def install_environment(host: Host) -> None:
    """Install the package beside its locked dependencies, which are installed once; link the `cpuos` command."""
    settings, tree, target = host.settings, source_tree(), host.environment
    if tree is None:
        return
    if (target / "complete").is_file():
        os.utime(target)  # an earlier version, taken up again: the newest from now on
    else:
        _install_package(host, tree)
    _link(settings.venv_dir / "current", target)
    if settings.run_dir == DEFAULT_RUN_DIR and (other := link_command(settings)):
        host.note(f"kept {LINK}: it is the command of another installation, {other}")
    _remove_old_environments(settings, current=target)


def link_command(settings: Settings) -> Path | None:
    """Have the `cpuos` command of this machine lead here, unless it is that of another installation: returns that."""
    ours = settings.venv_dir / "current" / "bin" / "cpuos"
    if LINK.exists() and not is_own_command(settings):
        return LINK.resolve()
    if ours.exists() and not _leads_to(LINK, ours):
        _link(LINK, ours)
    return None


def is_own_command(settings: Settings) -> bool:
    """Whether the `cpuos` command of this machine leads into this data directory."""
    return LINK.is_symlink() and LINK.readlink().is_relative_to(settings.venv_dir)


def _install_package(host: Host, tree: Path) -> None:
    settings, target = host.settings, host.environment
    uv, variables = uv_path(host), {"UV_CACHE_DIR": str(settings.cache_dir / "uv-cache"), "UV_LINK_MODE": "hardlink"}
    dependencies = _install_dependencies(host, tree, uv=uv, variables=variables)
    shutil.rmtree(target, ignore_errors=True)
    host.run([uv, "venv", "--quiet", "--no-project", "--python", readable_python(), target], env=variables)
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--python", target]
    host.run([*install, tree], env=variables, network=True)
    (_site_packages(target) / "dependencies.pth").write_text(f"{_site_packages(dependencies)}\n")
    (target / "complete").write_text(dependencies.name)


def _install_dependencies(host: Host, tree: Path, *, uv: Path, variables: dict[str, str]) -> Path:
    """An environment with what uv.lock names, by hash; made anew only when that changes."""
    requirements = host.settings.cache_dir / "requirements.txt"
    requirements.parent.mkdir(parents=True, exist_ok=True)
    export = [uv, "export", "--quiet", "--frozen", "--no-dev", "--extra", "all", "--no-emit-project", "--no-header"]
    host.run([*export, "--project", tree, "--output-file", requirements], env=variables)
    python = readable_python()
    digest = hashlib.sha256(requirements.read_bytes() + str(python.resolve()).encode()).hexdigest()[:12]
    target = host.settings.venv_dir / f"dependencies-{digest}"
    if (target / "complete").is_file():
        return target
    shutil.rmtree(target, ignore_errors=True)
    host.run([uv, "venv", "--quiet", "--no-project", "--python", python, target], env=variables)
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--require-hashes", "--python", target]
    host.run([*install, "--requirement", requirements], env=variables, network=True)
    (target / "complete").write_text("")
    return target


def _site_packages(environment: Path) -> Path:
    return next((environment / "lib").glob("python3.*")) / "site-packages"


def readable_python() -> Path:
    """A Python of at least 3.11 that every user can run; one below /root is of no use to the daemons."""
    folders = ("/usr/bin", "/usr/local/bin")
    names = ["python3", *(f"python3.{minor}" for minor in range(20, 10, -1))]
    candidates = [Path(folder) / name for folder in folders for name in names] + [Path(sys.executable)]
    for candidate in candidates:
        if not candidate.exists():
            continue
        real = candidate.resolve()
        found = re.fullmatch(r"python3\.(\d+)", real.name)
        if found and int(found[1]) >= 11 and all(_is_open(part) for part in (real, *real.parents)):
            return candidate
    raise SetupRequired(
        "cannot find a Python for the daemons",
        "it must be 3.11 or newer and readable by every user",
        hint="apt-get install python3",
    )


def _is_open(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IXOTH)


def source_hash(tree: Path) -> str:
    digest = hashlib.sha256(str(readable_python().resolve()).encode())
    package = tree / "src" / "cpuos"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in sorted([*files, tree / "pyproject.toml", tree / "uv.lock"]):
        digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _leads_to(link: Path, target: Path) -> bool:
    return link.is_symlink() and link.readlink() == target


def _link(link: Path, target: Path) -> None:
    partial = link.with_name(f".{link.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(link)


def _remove_old_environments(settings: Settings, *, current: Path) -> None:
    """Keep the current one, the newest few, those that a running daemon uses, and the dependencies of all these."""
    found = [path for path in settings.venv_dir.iterdir() if path.is_dir() and not path.is_symlink()]
    versions = sorted(
        (path for path in found if not path.name.startswith("dependencies-")), key=lambda path: path.stat().st_mtime
    )
    in_use = [line for _, line in command_lines()]
    kept = [current, *versions[-_KEPT_ENVIRONMENTS:]]
    kept += [path for path in versions if any(line.startswith(f"{path}/") for line in in_use)]
    needed = {(path / "complete").read_text() for path in kept if (path / "complete").is_file()}
    for path in found:
        if path not in kept and path.name not in needed:
            shutil.rmtree(path, ignore_errors=True)


def command_lines() -> list[tuple[str, str]]:
    """Pid and command line (NUL-separated) of every process."""
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines.append((folder.name, (folder / "cmdline").read_text(errors="replace")))
            except OSError:
                continue
    return lines
