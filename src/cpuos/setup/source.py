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
from cpuos.settings import Settings
from cpuos.setup.host import Host
from cpuos.setup.uv import uv_path

__all__ = ["environment_is_current", "environment_path", "install_environment", "source_tree"]

LINK = Path("/usr/local/bin/cpuos")
_DEFAULT_DATA_DIR = Path("/var/lib/cpuos")
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
    """Whether the environment for this code, as it was when set-up began, is complete."""
    environment = host.environment
    return environment == Path(sys.prefix) or (environment / "complete").is_file()


def install_environment(host: Host) -> None:
    """Install the locked dependencies, by their hashes, and the package; link the `cpuos` command."""
    settings, tree = host.settings, source_tree()
    if tree is None:
        return
    uv, target = uv_path(host), host.environment
    variables = {
        "UV_CACHE_DIR": str(settings.cache_dir / "uv-cache"),
        "UV_PYTHON_INSTALL_DIR": str(settings.data_dir / "python"),
    }
    variables |= {"VIRTUAL_ENV": str(target), "UV_LINK_MODE": "hardlink"}
    shutil.rmtree(target, ignore_errors=True)
    host.run([uv, "venv", "--quiet", "--python", readable_python(), target], env=variables, network=True)
    requirements = settings.cache_dir / "requirements.txt"
    export = [uv, "export", "--quiet", "--frozen", "--no-dev", "--extra", "all", "--no-emit-project", "--output-file"]
    host.run([*export, requirements, "--project", tree], env=variables)
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", target]
    host.run([*install, "--require-hashes", "--requirement", requirements], env=variables, network=True)
    host.run([*install, "--no-deps", tree], env=variables, network=True)
    (target / "complete").write_text("")
    _link(settings.venv_dir / "current", target)
    if settings.data_dir == _DEFAULT_DATA_DIR:
        _link(LINK, settings.venv_dir / "current" / "bin" / "cpuos")
    _remove_old_environments(settings)


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


def _link(link: Path, target: Path) -> None:
    partial = link.with_name(f".{link.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(link)


def _remove_old_environments(settings: Settings) -> None:
    """Keep the newest few, and those that a running daemon uses."""
    found = [path for path in settings.venv_dir.iterdir() if path.is_dir() and not path.is_symlink()]
    in_use = _command_lines()
    for path in sorted(found, key=lambda path: path.stat().st_mtime)[:-_KEPT_ENVIRONMENTS]:
        if f"{path}/" not in in_use:
            shutil.rmtree(path, ignore_errors=True)


def _command_lines() -> str:
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines.append((folder / "cmdline").read_text(errors="replace"))
            except OSError:
                continue
    return "\n".join(lines)
