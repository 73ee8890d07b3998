"""The data directory on a volume of its own whose copies share blocks: XFS in a file that lies beside it.

    /var/lib/cpuos.xfs           the file, all its blocks taken
    /var/lib/cpuos.xfs.making    while it is made: what it is beside may be removed
    /var/lib/cpuos/.volume-id    on the volume: it is mounted
    /var/lib/cpuos/.volume       in the folder below the mount: it must be, and is not

Data that was there before is copied and compared; the mark below the mount is what decides which of both counts. Until
it is written a failure, or the end of the machine, leaves the folder as it was; from then on the volume counts, and
what is left of the old data goes. What starts cpuOS stays in the folder too, so that it can be mounted from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from cpuos.durable import sync_folder
from cpuos.errors import CapacityExceeded, Conflict, SetupRequired
from cpuos.settings import Settings
from cpuos.setup.host import Host
from cpuos.setup.trees import is_below, mount_points
from cpuos.setup.volume_copy import copy_tree, first_difference, used_mib

__all__ = [
    "MINIMUM_MIB",
    "is_mounted",
    "is_unmounted",
    "make_volume",
    "mount_first",
    "mount_volume",
    "remove_volume",
    "volume_image",
]

MINIMUM_MIB = 512
"""XFS wants 300 MiB."""
UNIT_FOLDER = Path("/etc/systemd/system")
_MARK, _ID = ".volume", ".volume-id"
# What stays in the folder below the mount: what starts cpuOS there, and says that it is to be mounted.
_KEPT = frozenset({"config.toml", "setup.lock", "venv", _MARK})
_MKFS = "mkfs.xfs"
_SPARE_MIB = 1024
"""Of the file system that the file lies on this much stays free."""
_UNIT = """[Unit]
Description=cpuOS data
Before=cpuos-node.service cpuos-server.service cpuos-gateway.service

[Mount]
What={image}
Where={folder}
Type=xfs
Options=loop

[Install]
WantedBy=multi-user.target cpuos.target
"""


def volume_image(settings: Settings) -> Path:
    return settings.data_dir.with_name(f"{settings.data_dir.name}.xfs")


def is_mounted(settings: Settings) -> bool:
    return (settings.data_dir / _ID).exists()


def is_unmounted(settings: Settings) -> bool:
    """The data lies on a volume that is not mounted."""
    return (settings.data_dir / _MARK).exists()


def make_volume(
    host: Host,
    *,
    size_mib: int,
    checkpoint: Callable[[str], None] = lambda point: None,
    units: Path = UNIT_FOLDER,
) -> bool:
    """Make it, move what is there onto it, and mount it; False when it is there already. `checkpoint` hears of each
    step that is done."""
    settings = host.settings
    if is_unmounted(settings):
        mount_volume(settings)
    if is_mounted(settings):
        _making(settings).unlink(missing_ok=True)
        _check_size(settings, size_mib)
        _write_unit(host, units)
        return False
    _require_still(settings)
    _remove_unfinished(settings)
    _require_room(settings, size_mib)
    if shutil.which(_MKFS) is None:
        _install_xfsprogs(host)
    settings.data_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    image = volume_image(settings)
    _making(settings).touch()
    try:
        _make_image(host, image, size_mib=size_mib)
        checkpoint("image")
        with _mounted(host, image, _new(settings)) as new:
            checkpoint("mounted")
            copy_tree(host, settings.data_dir, new)
            checkpoint("copied")
            if difference := first_difference(settings.data_dir, new, without={"logs", "setup.lock"}):
                raise SetupRequired(
                    f"cannot move {settings.data_dir}: the copy differs in {difference}",
                    "something has written to it meanwhile; it is as it was",
                    hint=f"ls -lt {settings.data_dir}",
                )
            checkpoint("compared")
            identity = secrets.token_hex(16)
            (new / _ID).write_text(identity)
            os.sync()
        _require_still(settings)
        checkpoint("ready")
    except BaseException:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _remove_unfinished(settings)
        raise
    _write_mark(settings, {"id": identity, "cleared": False})
    checkpoint("committed")
    mount_volume(settings, checkpoint=checkpoint)
    _write_unit(host, units)
    return True


def mount_volume(settings: Settings, *, checkpoint: Callable[[str], None] = lambda point: None) -> bool:
    """Mount it where it is to be mounted and is not; False when there is none, or it is."""
    mark = settings.data_dir / _MARK
    try:
        known = json.loads(mark.read_text())
    except FileNotFoundError:
        return False
    image = volume_image(settings)
    if not image.exists():
        raise SetupRequired(
            f"cannot use {settings.data_dir}: its volume is not there",
            f"the data lies in {image}",
            hint=f"ls -l {image.parent}",
        )
    if not known["cleared"]:  # all of it is on the volume, and was compared
        for path in settings.data_dir.iterdir():
            if path.name not in _KEPT:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        _write_mark(settings, known | {"cleared": True})
        _making(settings).unlink(missing_ok=True)
        checkpoint("cleared")
    _mount(image, settings.data_dir)
    found = settings.data_dir / _ID
    if not found.exists() or found.read_text() != known["id"]:
        subprocess.run(["umount", settings.data_dir], check=True)
        raise SetupRequired(
            f"cannot use {settings.data_dir}: {image} is another volume",
            "it does not have the mark that was put on it when it was made",
            hint=f"ls -l {image.parent}",
        )
    return True


def remove_volume(settings: Settings, *, units: Path = UNIT_FOLDER) -> list[str]:
    """Unmount it and remove its file, with all that is on it; nothing there is fine. The folder below stays."""
    removed = []
    image, made = volume_image(settings), is_mounted(settings) or is_unmounted(settings)
    if is_mounted(settings):
        # This very program may run from it: then it goes when that has ended.
        quiet = subprocess.run(["umount", settings.data_dir], capture_output=True).returncode == 0
        if not quiet:
            subprocess.run(["umount", "--lazy", settings.data_dir], check=True, capture_output=True)
        removed.append(f"mount {settings.data_dir}")
    unit = units / _unit_name(settings.data_dir)
    if unit.exists():
        subprocess.run(["systemctl", "disable", unit.name], capture_output=True) if _has_systemd() else None
        unit.unlink()
        removed.append(str(unit))
    if made and image.exists():
        image.unlink()
        removed.append(str(image))
    if _making(settings).exists():
        _remove_unfinished(settings)
    return removed


def _require_still(settings: Settings) -> None:
    """Raise unless nothing uses the data, and it is a plain folder with all of the instance's state in it."""
    folder = os.path.realpath(settings.data_dir)
    what = f"cannot move {settings.data_dir} onto a volume"
    if not settings.state_dir.is_relative_to(settings.data_dir):
        raise Conflict(what, f"the state lies in {settings.state_dir}, outside of it", hint="unset CPUOS_STATE_DIR")
    if settings.data_dir.is_symlink():
        raise Conflict(what, f"it is a link to {folder}", hint=f"ls -ld {settings.data_dir}")
    if _processes(settings):
        why = f"cpuOS runs: processes {', '.join(_processes(settings)[:5])}"
        raise Conflict(what, why, hint="sudo cpuos down --pause")
    mounted = [point for point in mount_points() if is_below(point, folder)]
    if folder in mounted:
        why = "it is a volume of its own already, made by somebody else"
        raise Conflict(what, why, hint=f"findmnt {settings.data_dir}")
    if mounted:
        raise Conflict(what, f"in use: {mounted[0]} is mounted", hint="sudo cpuos down --pause")
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if is_below(backing.read_text().strip(), folder):
                why = f"in use: /dev/{backing.parts[3]} is backed by {backing.read_text().strip()}"
                raise Conflict(what, why, hint="sudo cpuos down --pause")


def _require_room(settings: Settings, size_mib: int) -> None:
    what = f"cannot make a volume of {size_mib} MiB for {settings.data_dir}"
    used = used_mib(settings.data_dir) if settings.data_dir.exists() else 0
    if size_mib < max(MINIMUM_MIB, used * 5 // 4):
        why = f"{used} MiB lie there; it takes {max(MINIMUM_MIB, used * 5 // 4)} MiB at least"
        raise CapacityExceeded(what, why, hint="cpuos setup storage --reflink-volume SIZE")
    free = shutil.disk_usage(settings.data_dir.parent).free >> 20
    if free < size_mib + _SPARE_MIB:
        why = f"{settings.data_dir.parent} has {free} MiB free, and all of its blocks are taken at once"
        raise CapacityExceeded(what, why, hint=f"df -h {settings.data_dir.parent}")
    if volume_image(settings).exists():
        raise Conflict(what, f"{volume_image(settings)} is there already", hint=f"ls -l {volume_image(settings)}")


def _check_size(settings: Settings, size_mib: int) -> None:
    there = volume_image(settings).stat().st_size >> 20
    if there != size_mib:
        raise Conflict(
            f"cannot make the volume of {settings.data_dir} {size_mib} MiB large",
            f"it is there with {there} MiB; docs/how-to/operate.md says how it is made larger",
            hint=f"ls -l {volume_image(settings)}",
        )


def _install_xfsprogs(host: Host) -> None:
    wait = ["-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
    host.run(["apt-get", *wait, "update"], network=True, contained=False)
    host.run(
        ["apt-get", *wait, "install", "--yes", "--no-install-recommends", "xfsprogs"], network=True, contained=False
    )


def _make_image(host: Host, image: Path, *, size_mib: int) -> None:
    host.run(["fallocate", "--length", f"{size_mib}MiB", image])
    image.chmod(0o600)
    host.run([_MKFS, "-q", "-m", "reflink=1", image])


@contextlib.contextmanager
def _mounted(host: Host, image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir(mode=0o700)
    _mount(image, folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, capture_output=True)
        folder.rmdir()


def _mount(image: Path, folder: Path) -> None:
    done = subprocess.run(["mount", "-t", "xfs", "-o", "loop", image, folder], capture_output=True, text=True)
    if done.returncode != 0:
        raise SetupRequired(
            f"cannot mount {image} on {folder}", done.stderr.strip(), hint="modprobe loop; modprobe xfs"
        )


def _remove_unfinished(settings: Settings) -> None:
    """What an earlier try left that did not come to its mark."""
    new = _new(settings)
    if new.exists():
        if os.path.realpath(new) in mount_points():
            subprocess.run(["umount", new], check=True, capture_output=True)
        new.rmdir()
    if _making(settings).exists():
        if not (is_unmounted(settings) or is_mounted(settings)):
            volume_image(settings).unlink(missing_ok=True)
        _making(settings).unlink()


def _write_mark(settings: Settings, values: dict[str, object]) -> None:
    draft = settings.data_dir / f"{_MARK}.part"
    with draft.open("w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(settings.data_dir / _MARK)
    sync_folder(settings.data_dir)


def _write_unit(host: Host, units: Path) -> None:
    """So that systemd mounts it when the machine starts. Elsewhere `cpuos up` does."""
    if not _has_systemd(units):
        return
    unit = units / _unit_name(host.settings.data_dir)
    text = _UNIT.format(image=volume_image(host.settings), folder=host.settings.data_dir)
    if unit.exists() and unit.read_text() == text:
        return
    unit.write_text(text)
    if units == UNIT_FOLDER:
        host.run(["systemctl", "daemon-reload"], contained=False)
        host.run(["systemctl", "enable", unit.name], contained=False)


def _has_systemd(units: Path = UNIT_FOLDER) -> bool:
    return units != UNIT_FOLDER or Path("/run/systemd/system").is_dir()


def _unit_name(folder: Path) -> str:
    """As `systemd-escape --path` has it."""
    text = str(folder).strip("/")
    safe = [letter if letter.isalnum() or letter in ":_." else f"\\x{ord(letter):02x}" for letter in text]
    return "".join("-" if plain == "/" else made for plain, made in zip(text, safe, strict=True)) + ".mount"


def _processes(settings: Settings) -> list[str]:
    from cpuos.services import status
    from cpuos.setup.source import command_lines

    prefix = f"{settings.venv_dir}/"
    found = [
        pid for pid, line in command_lines() if line.startswith(prefix) and " -m cpuos." in line.replace("\0", " ")
    ]
    return found or [str(part.pid) for part in status(settings).parts if part.pid]


def _new(settings: Settings) -> Path:
    return settings.data_dir.with_name(f"{settings.data_dir.name}.new")


def _making(settings: Settings) -> Path:
    return settings.data_dir.with_name(f"{settings.data_dir.name}.xfs.making")


def mount_first(settings: Settings) -> bool:
    """For a program that starts cpuOS: as `mount_volume`, and it begins anew where its own files lie there."""
    mounted = mount_volume(settings)
    if mounted and Path(sys.prefix).is_relative_to(settings.data_dir):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return mounted
