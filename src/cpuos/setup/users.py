"""The group and the users that the unprivileged daemons and workers run as."""

from __future__ import annotations

import grp
import pwd

from cpuos.setup.host import Host

__all__ = ["GROUP", "USERS", "create_users", "remove_users", "users_exist"]

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
    """Create the group and the users: no home, no shell, no password."""
    if not _exists(grp.getgrnam, GROUP):
        host.run(["groupadd", "--system", GROUP], contained=False)
    for user in USERS:
        if _exists(pwd.getpwnam, user):
            host.run(["usermod", "--gid", GROUP, user], contained=False)
            continue
        options = ["--system", "--gid", GROUP, "--home-dir", "/nonexistent", "--no-create-home"]
        host.run(["useradd", *options, "--shell", "/usr/sbin/nologin", user], contained=False)


def remove_users(host: Host) -> None:
    """Remove users and group; tolerates their absence."""
    for user in USERS:
        if _exists(pwd.getpwnam, user):
            host.run(["userdel", user], contained=False)
    if _exists(grp.getgrnam, GROUP):
        host.run(["groupdel", GROUP], contained=False)


def _exists(look_up: object, name: str) -> bool:
    try:
        look_up(name)  # type: ignore[operator]
    except KeyError:
        return False
    return True
