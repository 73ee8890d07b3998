"""Where a user's key lies. `cpuos up` writes it there and clients read it there, so that each finds it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

__all__ = ["DEFAULT_RUN_DIR", "calling_user", "key_file", "key_file_below"]

DEFAULT_RUN_DIR = Path("/run/cpuos")
_BELOW_HOME = Path(".config/cpuos/credentials.json")


def calling_user(environ: Mapping[str, str] | None = None) -> int:
    """The user behind sudo, else this one."""
    sudo = (os.environ if environ is None else environ).get("SUDO_UID", "")
    return int(sudo) if os.geteuid() == 0 and sudo.isdigit() else os.geteuid()


def key_file(environ: Mapping[str, str] | None = None, *, run_dir: Path | None = None) -> Path:
    """Of the machine's own instance: below the home of the user behind sudo, else below $HOME. Of an instance with
    another run directory: in that. Without `run_dir` it is as the environment says."""
    environ = os.environ if environ is None else environ
    run_dir = run_dir or Path(environ.get("CPUOS_RUN_DIR") or DEFAULT_RUN_DIR)
    if run_dir != DEFAULT_RUN_DIR:
        return run_dir / _BELOW_HOME.name
    user = calling_user(environ)
    if user != os.geteuid():  # sudo has changed HOME, or not, as it is configured
        try:
            return key_file_below(Path(pwd.getpwuid(user).pw_dir))
        except KeyError:
            pass
    return key_file_below(Path(environ.get("HOME") or Path.home()))


def key_file_below(home: Path) -> Path:
    return home / _BELOW_HOME
