"""What sandboxes of an instance have on the host, found from outside: files, mounts, loops, groups, processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from cpuos.node.storage import release_mount_namespace
from cpuos.runtimes.limits import ControlGroups
from cpuos.settings import Settings

__all__ = ["find_traces", "remove_groups", "remove_mounts"]

_ID = re.compile(r"(?<![a-z0-9])[a-z0-9]{20}(?![a-z0-9])")
_CGROUPS = Path("/sys/fs/cgroup")


def find_traces(settings: Settings, *, node_pid: int, except_for: Collection[str] = ()) -> list[str]:
    """One line for each trace of a sandbox that is not excepted."""
    found = []
    for kind, name in _traces(settings, node_pid):
        ids = set(_ID.findall(name))
        if ids and not ids <= set(except_for):
            found.append(f"{kind} {name}")
    return sorted(set(found))


def remove_mounts(settings: Settings) -> None:
    """Give up the node's mount namespace, in which all its mounts are."""
    if os.geteuid() == 0:
        release_mount_namespace(settings.run_dir / "ns" / "mnt")


def remove_groups(settings: Settings) -> None:
    """With what still runs in them: a node that has died has ended nothing."""
    groups = ControlGroups(settings.instance_id)
    for sandbox_id in groups.list() if _CGROUPS.is_dir() else ():
        groups.kill(sandbox_id)
    for top in _groups(settings):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _traces(settings: Settings, node_pid: int) -> Iterator[tuple[str, str]]:
    state, run = settings.node_state_dir, settings.run_dir
    folders = {
        "work folder": state / "sandboxes",
        "disk": state / "disks",
        "network name": run / "netns",
        "runtime file": run / "runtimes" / "gvisor" / "root",
        "machine": run / "runtimes" / "microvm",
        "fake sandbox": run / "fake" / "runtime",
        "fake disk": run / "fake" / "disks",
        "fake slot": run / "fake" / "slots",
    }
    for kind, folder in folders.items():
        for path in folder.iterdir() if folder.is_dir() else ():
            yield kind, path.name
    for path in (state / "snapshots").glob("*-*"):  # a sandbox's own, and parts of any; snapshots are nobody's
        yield "image", path.name
    yield from _open_records(state / "journal")
    yield from _mounts(settings, node_pid)
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            image = backing.read_text().strip()
            if image.startswith(f"{os.path.realpath(settings.state_dir)}/"):
                yield "loop device", image
    for top in _groups(settings):
        for folder in top.iterdir():
            if folder.is_dir():
                yield "control group", str(folder)
    yield from _processes(settings, node_pid)


def _open_records(journal: Path) -> Iterator[tuple[str, str]]:
    """Records of sandboxes that still have, or may have, something on the host."""
    for path in journal.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            if not json.loads(path.read_text())["ended"]:
                yield "record", path.name


def _mounts(settings: Settings, node_pid: int) -> Iterator[tuple[str, str]]:
    places = (f"{os.path.realpath(settings.state_dir)}/", f"{os.path.realpath(settings.run_dir)}/")
    for line in Path(f"/proc/{node_pid}/mountinfo").read_text().splitlines():
        point = line.split()[4]
        if point.startswith(places) and _ID.search(point):
            yield "mount", point


def _groups(settings: Settings) -> list[Path]:
    name = f"cpuos-{settings.instance_id}"
    hierarchies = [_CGROUPS, *(path for path in _CGROUPS.iterdir() if path.is_dir())] if _CGROUPS.is_dir() else []
    return [hierarchy / name for hierarchy in hierarchies if (hierarchy / name).is_dir()]


def _processes(settings: Settings, node_pid: int) -> Iterator[tuple[str, str]]:
    """Programs of the runtime that name this instance's folders and a sandbox."""
    run = str(settings.run_dir)
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in (node_pid, os.getpid()):
            continue
        with contextlib.suppress(OSError):
            words = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if run in words and "runsc" in words and (match := _ID.search(words)):
                yield "process", f"{entry.name} of {match[0]}"
