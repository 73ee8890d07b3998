"""`cpuos uninstall`: takes back everything that set-up and the daemons made on the host."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from cpuos.errors import Conflict, SetupRequired
from cpuos.key_file import calling_user
from cpuos.services.control import down
from cpuos.services.credentials import forget_keys
from cpuos.services.groups import remove_groups
from cpuos.settings import DEFAULT_RUN_DIR, Settings, load_settings
from cpuos.setup.host import Host
from cpuos.setup.source import LINK, command_lines
from cpuos.setup.trees import is_below, mount_points, remove_tree
from cpuos.setup.users import USERS, remove_users

__all__ = ["uninstall"]


def uninstall(settings: Settings | None = None, *, purge: bool = False, uid: int | None = None) -> list[str]:
    """Stop the instance and remove what it made; with `purge` also data, caches, users. Returns what was removed."""
    settings = settings or load_settings()
    if os.geteuid() != 0:
        raise SetupRequired("cannot uninstall cpuOS: not root", "", code="needs_root", hint="sudo cpuos uninstall")
    user = calling_user() if uid is None else uid
    down(settings, uid=user)
    # Artifacts are shared: they go with the instance whose state lies among them.
    owns_data = settings.state_dir.is_relative_to(settings.data_dir)
    if purge and owns_data and (users := _daemons_of(settings)):
        raise Conflict(
            f"cannot remove {settings.data_dir}: other instances run from it",
            f"processes: {', '.join(users)}",
            hint=f"ps -fp {users[0]}",
        )
    removed = [*_remove_network(settings), *_remove_mounts(settings), *remove_groups(settings)]
    folders = [settings.run_dir]
    if purge:
        folders += [settings.state_dir, *([settings.data_dir] if owns_data else [])]
        removed += forget_keys(settings)
    if settings.run_dir == DEFAULT_RUN_DIR and LINK.is_symlink():
        LINK.unlink()
        removed.append(str(LINK))
    if purge and settings.run_dir == DEFAULT_RUN_DIR:
        with open(os.devnull, "w") as log:
            remove_users(Host(settings, log=log))
        removed.append(f"the users {', '.join(USERS)}")
    # Last, for this very program may lie below.
    for folder in folders:
        if folder.exists():
            remove_tree(folder)
            removed.append(str(folder))
    return removed


def _remove_network(settings: Settings) -> list[str]:
    """The link, with its route, and the table; the hub goes with the mounts."""
    from cpuos.node.network.hub import remove_host_network

    return remove_host_network(settings.instance_id)


def _remove_mounts(settings: Settings) -> list[str]:
    """Mounts below run and state directory, deepest first, and loop devices on images below them."""
    removed = []
    roots = [os.path.realpath(path) for path in (settings.run_dir, settings.state_dir)]
    for point in sorted(mount_points(), key=len, reverse=True):
        if any(is_below(point, root) for root in roots):
            subprocess.run(["umount", "--lazy", point], capture_output=True)
            removed.append(f"mount {point}")
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            image = backing.read_text().strip()
            if any(is_below(image, root) for root in roots):
                device = f"/dev/{backing.parts[3]}"
                subprocess.run(["losetup", "--detach", device], capture_output=True)
                removed.append(f"loop device {device}")
    return removed


def _daemons_of(settings: Settings) -> list[str]:
    prefix = f"{settings.venv_dir}/"
    return [pid for pid, line in command_lines() if line.startswith(prefix) and " -m cpuos." in line.replace("\0", " ")]
