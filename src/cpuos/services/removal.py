"""`cpuos uninstall`: takes back everything that set-up and the daemons made on the host.

It never stops half-way: what cannot be removed is told at the end, and everything else is gone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cpuos.errors import CpuosError, SetupRequired
from cpuos.key_file import calling_user
from cpuos.services.control import down
from cpuos.services.credentials import forget_keys
from cpuos.services.groups import remove_groups
from cpuos.services.ownership import other_owner
from cpuos.settings import DEFAULT_DATA_DIR, Settings, load_settings
from cpuos.setup.host import Host
from cpuos.setup.source import LINK, command_lines, is_own_command
from cpuos.setup.trees import is_below, mount_points, remove_tree
from cpuos.setup.users import GROUP, USERS, existing, processes_of_users, remove_users, users_made
from cpuos.setup.volume import remove_volume

__all__ = ["Left", "Removal", "uninstall"]


@dataclass(frozen=True, kw_only=True)
class Left:
    """Something that stays."""

    what: str
    why: str
    hint: str
    """The next command."""
    is_failure: bool = True
    """False: it is not this installation's to remove."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What `uninstall` did."""

    removed: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def attempt(self, what: str, work: Callable[[], list[str]]) -> None:
        """What `work` says it removed is removed; its failure is told, and no reason to stop."""
        try:
            self.removed.extend(work())
        except CpuosError as error:
            self.keep(what, error.why or error.what, hint=error.hint or f"ls -la {shlex.quote(what)}")
        except (OSError, subprocess.SubprocessError) as error:
            self.keep(what, str(error), hint="cpuos doctor")

    def keep(self, what: str, why: str, *, hint: str, is_failure: bool = True) -> None:
        self.left.append(Left(what=what, why=why, hint=hint, is_failure=is_failure))


def uninstall(settings: Settings | None = None, *, purge: bool = False, uid: int | None = None) -> Removal:
    """Stop the instance and remove what it made; with `purge` also data, caches, keys, users."""
    settings = settings or load_settings()
    if os.geteuid() != 0:
        raise SetupRequired("cannot uninstall cpuOS: not root", "", code="needs_root", hint="sudo cpuos uninstall")
    removal = Removal()
    folders = []
    if owner := other_owner(settings):
        why, hint = f"the installation with its state in {owner} runs from it", f"ls -la {settings.run_dir}"
        removal.keep(str(settings.run_dir), why, hint=hint, is_failure=False)
    else:
        down(settings, uid=calling_user() if uid is None else uid)
        folders = [settings.run_dir]
    removal.attempt("network", partial(_remove_network, settings))
    removal.attempt("mounts", partial(_remove_mounts, [*folders, settings.state_dir]))
    removal.attempt("control groups", partial(remove_groups, settings))
    made = users_made(settings)
    if purge:
        removal.attempt("keys", partial(forget_keys, settings))
        folders += _data_folders(settings, removal)
    if purge and settings.data_dir in folders:
        removal.attempt(str(settings.data_dir), partial(remove_volume, settings))
    # Last, for this very program may lie below; and the command goes only when what it starts is gone.
    for folder in folders:
        removal.attempt(str(folder), partial(_remove_folder, folder))
    if purge and not settings.data_dir.exists():
        _remove_users(settings, removal, made=made)
    if purge and is_own_command(settings) and not LINK.exists():
        removal.attempt(str(LINK), _remove_command)
    return removal


def _data_folders(settings: Settings, removal: Removal) -> list[Path]:
    """Artifacts are shared: they go with the instance whose state lies among them, when no other runs from them."""
    if not settings.state_dir.is_relative_to(settings.data_dir):
        return [settings.state_dir]
    if users := _daemons_of(settings):
        why = f"other instances run from it: processes {', '.join(users)}"
        removal.keep(str(settings.data_dir), why, hint=f"ps -fp {users[0]}")
        return [settings.state_dir]
    return [settings.state_dir, settings.data_dir]


def _remove_folder(folder: Path) -> list[str]:
    if not folder.exists():
        return []
    remove_tree(folder)
    return [str(folder)]


def _remove_command() -> list[str]:
    LINK.unlink()
    return [str(LINK)]


def _remove_users(settings: Settings, removal: Removal, *, made: set[str]) -> None:
    """Only those that this installation's set-up made, and only when nothing else needs them."""
    there = existing({*USERS, GROUP})
    if not there:
        return
    what = f"the users {', '.join(USERS)} and the group {GROUP}"
    remove = "; ".join([*(f"userdel {user}" for user in USERS if user in there), f"groupdel {GROUP}"])
    if others := _other_installations(settings):
        removal.keep(what, f"the installation in {others[0]} uses them", hint=f"ls {others[0]}", is_failure=False)
    elif there - made:
        why = f"the set-up of {settings.data_dir} did not make {', '.join(sorted(there - made))}"
        removal.keep(what, why, hint=remove, is_failure=False)
    elif pids := processes_of_users(made):
        removal.keep(what, f"processes run as them: {', '.join(pids[:5])}", hint=f"ps -fp {pids[0]}")
    else:
        with open(os.devnull, "w") as log:
            removal.attempt(what, partial(_remove_made_users, Host(settings, log=log), there))


def _remove_made_users(host: Host, names: set[str]) -> list[str]:
    remove_users(host, names)
    return [f"the users {', '.join(USERS)}"]


def _other_installations(settings: Settings) -> list[Path]:
    """Data directories of others, as far as this machine tells."""
    candidates = [DEFAULT_DATA_DIR]
    if LINK.exists() and not is_own_command(settings):
        candidates += [parent.parent for parent in LINK.resolve().parents if parent.name == "venv"]
    own = os.path.realpath(settings.data_dir)
    return [path for path in candidates if (path / "venv").is_dir() and os.path.realpath(path) != own]


def _remove_network(settings: Settings) -> list[str]:
    """The link, with its route, and the table; the hub goes with the mounts."""
    from cpuos.node.network.hub import remove_host_network

    return remove_host_network(settings.instance_id)


def _remove_mounts(folders: list[Path]) -> list[str]:
    """Mounts below these, deepest first, and loop devices on images below them."""
    removed = []
    roots = [os.path.realpath(path) for path in folders]
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
