"""The group and the users that the unprivileged daemons and workers run as."""

from __future__ import annotations

import contextlib
import grp
import pwd
from collections.abc import Iterable
from pathlib import Path

from cpuos.settings import Settings
from cpuos.setup.host import Host

__all__ = [
    "GROUP",
    "USERS",
    "create_users",
    "existing",
    "processes_of_users",
    "remove_users",
    "users_exist",
    "users_made",
]

GROUP = "cpuos"
USERS = ("cpuos-server", "cpuos-gateway", "cpuos-network")


def users_exist(host: Host) -> bool:
    """Whether group and users are there, and the users are in the group."""
    try:
        gid = grp.getgrnam(GROUP).gr_gid
        return all(pwd.getpwnam(user).pw_gid == gid for user in USERS)
    except KeyError:
        return False


def create_users(host: Host) -> None:
    """Create the group and the users: no home, no shell, no password. What is made here is written down, for
    `remove_users`."""
    if not _exists(grp.getgrnam, GROUP):
        host.run(["groupadd", "--system", GROUP], contained=False)
        _note(host, GROUP)
    for user in USERS:
        if _exists(pwd.getpwnam, user):
            host.run(["usermod", "--gid", GROUP, user], contained=False)
            continue
        options = ["--system", "--gid", GROUP, "--home-dir", "/nonexistent", "--no-create-home"]
        host.run(["useradd", *options, "--shell", "/usr/sbin/nologin", user], contained=False)
        _note(host, user)


def users_made(settings: Settings) -> set[str]:
    """The users, and perhaps the group, that set-up into this data directory has made."""
    try:
        return set(settings.users_made.read_text().split())
    except OSError:
        return set()


def _note(host: Host, name: str) -> None:
    with host.settings.users_made.open("a") as file:
        file.write(f"{name}\n")


def remove_users(host: Host, names: set[str]) -> None:
    """Remove those of our users, and the group, that are named; tolerates their absence."""
    for user in USERS:
        if user in names and _exists(pwd.getpwnam, user):
            host.run(["userdel", user], contained=False)
    if GROUP in names and _exists(grp.getgrnam, GROUP):
        host.run(["groupdel", GROUP], contained=False)


def processes_of_users(names: set[str], *, root: Path = Path("/proc")) -> list[str]:
    """Pids of processes that run as one of them."""
    uids = {pwd.getpwnam(name).pw_uid for name in names if name in USERS and _exists(pwd.getpwnam, name)}
    found = []
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and folder.stat().st_uid in uids:
                found.append(folder.name)
    return sorted(found, key=int)


def existing(names: Iterable[str]) -> set[str]:
    """Those of these that there are, as user or as group."""
    return {name for name in names if _exists(grp.getgrnam if name == GROUP else pwd.getpwnam, name)}


def _exists(look_up: object, name: str) -> bool:
    try:
        look_up(name)  # type: ignore[operator]
    except KeyError:
        return False
    return True
