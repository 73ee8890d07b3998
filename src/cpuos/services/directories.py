"""The folders of an instance: who owns each, and who may look inside."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.settings import Settings
from cpuos.setup.users import GROUP, USERS

__all__ = ["make_directories"]


def make_directories(settings: Settings) -> None:
    """Make them, or mend owner and mode of those that are there."""
    gid = grp.getgrnam(GROUP).gr_gid
    server, gateway, network = (pwd.getpwnam(user).pw_uid for user in USERS)
    rows = [
        (settings.state_dir, 0, 0o750),
        (settings.log_dir, 0, 0o750),
        (settings.node_state_dir, 0, 0o700),
        (settings.server_state_dir, server, 0o700),
        (settings.gateway_state_dir, gateway, 0o700),
        (settings.network_state_dir, network, 0o700),
        (settings.run_dir, 0, 0o750),
        (settings.server_run_dir, server, 0o750),
        (settings.gateway_run_dir, gateway, 0o750),
        (settings.network_run_dir, 0, 0o750),
    ]
    for path, uid, mode in rows:
        _make(path, uid=uid, gid=gid, mode=mode)
    for path in (settings.state_dir, settings.run_dir, settings.data_dir):
        _require_way(path.parent)


def _make(path: Path, *, uid: int, gid: int, mode: int) -> None:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SetupRequired(
            f"cannot make the folder {path}", error.strerror or str(error), hint=f"ls -ld {path.parent}"
        ) from error
    try:
        os.fchown(descriptor, uid, gid)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _require_way(path: Path) -> None:
    """Every folder above must let the daemons' users pass; one below /root does not."""
    for folder in (path, *path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            raise SetupRequired(
                f"cannot use the folder {path}",
                f"the users {', '.join(USERS)} cannot pass {folder}",
                hint=f"chmod o+x {folder}",
            )
