"""The API key of the user who ran `cpuos up`: handed over once, in a file that only they can read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.key_file import calling_user, key_file
from cpuos.services.health import ask
from cpuos.settings import DEFAULT_RUN_DIR, Settings

__all__ = [
    "credentials_path",
    "forget_keys",
    "hand_over_key",
    "keys_handed_over",
    "make_key",
    "read_credentials",
    "write_credentials",
]

_KEPT = "credentials.kept.json"
"""Beside the file: what it held before, where that was another installation's."""


def credentials_path(settings: Settings, *, uid: int) -> Path:
    """Where that user's client looks: see `key_file`."""
    environ = os.environ if uid == calling_user() else {"HOME": pwd.getpwuid(uid).pw_dir}
    return key_file(environ, run_dir=settings.run_dir)


def hand_over_key(
    settings: Settings, *, python: Path, api_url: str, uid: int, tell: Callable[[str], None] = lambda text: None
) -> Path:
    """See that the credentials file holds a key that works; returns its path."""
    path = credentials_path(settings, uid=uid)
    stored = read_credentials(path)
    key = stored.get("api_key", "")
    if settings.first_key_file.exists():
        key = str(json.loads(settings.first_key_file.read_text())["api_key"])
    elif not key or stored.get("api_url") != api_url or ask(api_url, "/v1/sandboxes", key=key)[0] != 200:
        key = make_key(settings, python=python, name=pwd.getpwuid(uid).pw_name)
    wanted = {"api_url": api_url, "api_key": key}
    handed_over = keys_handed_over(settings)
    _note_key(settings, path, key)
    if any(stored.get(name) != value for name, value in wanted.items()):
        owner = uid if settings.run_dir == DEFAULT_RUN_DIR else 0
        if stored.get("api_key") and handed_over.get(str(path)) != _digest(stored["api_key"]):
            kept = path.with_name(_KEPT)
            if not kept.exists():
                write_credentials(kept, stored, uid=owner)
            tell(f"kept the key of {stored.get('api_url')}, which another installation gave: {kept}")
        write_credentials(path, {**stored, **wanted}, uid=owner)
    settings.first_key_file.unlink(missing_ok=True)
    return path


def keys_handed_over(settings: Settings) -> dict[str, str]:
    """The files that this installation wrote a key to, each with the key's hash."""
    return read_credentials(settings.keys_handed_over)


def _note_key(settings: Settings, path: Path, key: str) -> None:
    noted = {**keys_handed_over(settings), str(path): _digest(key)}
    if noted != keys_handed_over(settings):
        _write_private(settings.keys_handed_over, noted)


def forget_keys(settings: Settings) -> list[str]:
    """Take this installation's keys out of the files that it wrote them to. What else a file or folder holds stays, and
    what was kept for another installation comes back."""
    removed = []
    for name, digest in keys_handed_over(settings).items():
        path = Path(name)
        stored = read_credentials(path)
        if _digest(stored.get("api_key", "")) != digest:
            continue
        _as_user(path.lstat().st_uid, partial(_forget, path, stored), what=f"remove {path}")
        removed.append(name)
    return removed


def _forget(path: Path, stored: dict[str, str]) -> None:
    rest = {name: value for name, value in stored.items() if name not in ("api_url", "api_key")}
    kept = path.with_name(_KEPT)
    if kept.exists():
        kept.replace(path)
    elif rest:
        _write_private(path, rest)
    else:
        path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_credentials(path: Path) -> dict[str, str]:
    """What the file holds; empty when there is none that can be read."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_credentials(path: Path, credentials: dict[str, str], *, uid: int) -> None:
    """Write it as that user (0600, folder 0700)."""
    _as_user(uid, lambda: _write_private(path, credentials), what=f"write {path}")


def _as_user(uid: int, work: Callable[[], None], *, what: str) -> None:
    """As that user root follows no link that a user planted in their own folders."""
    if os.geteuid() == uid:
        work()
        return
    user = pwd.getpwuid(uid)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.initgroups(user.pw_name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(uid)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SetupRequired(f"cannot {what}", f"{user.pw_name} may not", hint=f"ls -ld {what.split()[-1]}")


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
