"""The API key of the user who ran `cpuos up`: handed over once, in a file that only they can read."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.services.health import ask
from cpuos.settings import DEFAULT_RUN_DIR, Settings

__all__ = ["calling_user", "credentials_path", "hand_over_key", "make_key", "read_credentials", "write_credentials"]


def calling_user() -> int:
    """The user behind sudo, else this one."""
    sudo = os.environ.get("SUDO_UID", "")
    return int(sudo) if sudo.isdigit() else os.getuid()


def credentials_path(settings: Settings, *, uid: int) -> Path:
    """`~/.config/cpuos/credentials.json` for this machine's instance, a file in the run directory for any other."""
    if settings.run_dir != DEFAULT_RUN_DIR:
        return settings.run_dir / "credentials.json"
    return Path(pwd.getpwuid(uid).pw_dir) / ".config" / "cpuos" / "credentials.json"


def hand_over_key(settings: Settings, *, python: Path, api_url: str, uid: int) -> Path:
    """See that the credentials file holds a key that works; returns its path."""
    path = credentials_path(settings, uid=uid)
    stored = read_credentials(path)
    key = stored.get("api_key", "")
    if settings.first_key_file.exists():
        key = str(json.loads(settings.first_key_file.read_text())["api_key"])
    elif not key or stored.get("api_url") != api_url or ask(api_url, "/v1/sandboxes", key=key)[0] != 200:
        key = make_key(settings, python=python, name=pwd.getpwuid(uid).pw_name)
    if stored != (wanted := {"api_url": api_url, "api_key": key}):
        owner = uid if settings.run_dir == DEFAULT_RUN_DIR else 0
        write_credentials(path, wanted, uid=owner)
    settings.first_key_file.unlink(missing_ok=True)
    return path


def read_credentials(path: Path) -> dict[str, str]:
    """What the file holds; empty when there is none that can be read."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_credentials(path: Path, credentials: dict[str, str], *, uid: int) -> None:
    """Write it as that user (0600, folder 0700): root follows no link that a user planted in their own folders."""
    if os.geteuid() == uid:
        _write_private(path, credentials)
        return
    user = pwd.getpwuid(uid)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.initgroups(user.pw_name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(uid)
            _write_private(path, credentials)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SetupRequired(f"cannot write {path}", f"{user.pw_name} may not", hint=f"ls -ld {path.parent}")


def _write_private(path: Path, credentials: dict[str, str]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(credentials, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def make_key(settings: Settings, *, python: Path, name: str) -> str:
    """A new key, made as the server's user. Only its hash is kept: a key that was lost is replaced by another."""
    if not python.exists():
        raise SetupRequired("cannot make an API key: cpuOS is not set up", f"there is no {python}", hint="cpuos up")
    rights = ["setpriv", "--reuid", "cpuos-server", "--regid", "cpuos", "--clear-groups", "--"]
    done = subprocess.run(
        [*rights, str(python), "-m", "cpuos.server", "key", name],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "HOME": "/", **settings.environment()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode != 0:
        raise SetupRequired("cannot make an API key", done.stderr.strip()[-500:], hint="cpuos doctor")
    return str(json.loads(done.stdout.splitlines()[-1])["api_key"])
