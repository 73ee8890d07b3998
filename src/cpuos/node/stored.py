"""What takes room on this node, by name; and what of it nobody needs. Only names and lengths are looked at, never what
is in a file or on a disk."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cpuos.errors import CpuosError
from cpuos.node.images import Manifest
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.node.storage.extents import shared_bytes, shares_blocks
from cpuos.node.upkeep import Upkeep
from cpuos.runtimes.processes import unnamed_bytes
from cpuos.settings import RUNSC_VERSION, Settings
from cpuos.types.storage import NodeStorage, StorageItem, StorageKind

__all__ = ["Stored"]

_OF_IMAGES = {"pause": StorageKind.PAUSED, "root": StorageKind.ROOT}
# Of smaller files nobody asks who shares their blocks: caches have very many of them.
_SMALL = 1 << 20
# What the daemons of an instance keep beside the node's own folder.
_FOLDERS = {
    StorageKind.OUTPUT: lambda settings: [settings.gateway_state_dir],
    StorageKind.RECORDS: lambda settings: [settings.server_state_dir, settings.network_state_dir],
    StorageKind.LOGS: lambda settings: [settings.log_dir],
}


@dataclass(kw_only=True)
class _Counter:
    """Files count once, whatever their names."""

    seen: set[tuple[int, int]] = field(default_factory=set)

    def measure(self, *paths: Path) -> dict[str, int]:
        apparent = real = shared = 0
        for path in paths:
            for file, status in _files(path):
                taken = status.st_blocks * 512
                apparent += status.st_size
                if (status.st_dev, status.st_ino) in self.seen:
                    shared += taken
                    continue
                self.seen.add((status.st_dev, status.st_ino))
                real += taken
                try:
                    shared += shared_bytes(file) if taken >= _SMALL else 0
                except OSError:
                    continue  # gone meanwhile
        return {"apparent_bytes": apparent, "real_bytes": real, "shared_bytes": shared}


class Stored:
    def __init__(self, kit: Kit, *, upkeep: Upkeep, settings: Settings, node: str) -> None:
        self._kit = kit
        self._upkeep = upkeep
        self._settings = settings
        self._node = node

    async def report(self) -> NodeStorage:
        """All of it, the largest first."""
        records = {record.id: record for record in self._kit.ledger.all()}
        unneeded = await self._upkeep.unneeded()
        items = await asyncio.to_thread(lambda: list(self._items(records, set(unneeded))))
        items = sorted((item for item in items if item.apparent_bytes), key=lambda item: -item.real_bytes)
        reflink = await asyncio.to_thread(shares_blocks, self._settings.node_state_dir)
        return NodeStorage(node=self._node, volume=self._kit.volume.facts(), reflink=reflink, items=items)

    async def prune(self, *, dry_run: bool) -> list[StorageItem]:
        """Remove what nobody needs; or only say what that is."""
        plan = [item for item in (await self.report()).items if not item.needed]
        if dry_run:
            return plan
        if any(item.kind is StorageKind.KEPT for item in plan):
            await self._upkeep.collect(at_once=True)
        for item in plan:
            if item.kind is StorageKind.RUNTIME:
                await asyncio.to_thread(shutil.rmtree, self._runtimes() / item.name, ignore_errors=True)
        downloads = [item for item in plan if item.kind is StorageKind.CACHE]
        if downloads and not await asyncio.to_thread(self._remove_downloads, downloads):
            return [item for item in plan if item.kind is not StorageKind.CACHE]
        return plan

    def _remove_downloads(self, items: list[StorageItem]) -> bool:
        """False: a set-up has begun, and may be at work on them."""
        with _no_set_up(self._settings) as free:
            for item in items if free else []:
                shutil.rmtree(self._settings.cache_dir / item.name, ignore_errors=True)
            return free

    def _items(self, records: dict[str, Record], unneeded: set[Path]) -> Iterator[StorageItem]:
        count, settings, state = _Counter(), self._settings, self._settings.node_state_dir
        yield from _templates(count, settings)
        for path in _entries(state / "template-images"):
            said = {} if path not in unneeded else {"needed": False, "why": "no sandbox or snapshot was begun with it"}
            yield StorageItem(kind=StorageKind.KEPT, name=path.stem, **said, **count.measure(path))
        yield from self._images(count, records)
        for folder in _entries(state / "disks"):
            record = records.get(folder.name)
            said = {"name": folder.name, "state": _state(record)}
            yield StorageItem(kind=StorageKind.DISK, **said, **count.measure(folder / "image"))
            if record is not None and record.process is not None:
                layer = unnamed_bytes(record.process.pid, on=folder / "overlay")
                yield StorageItem(kind=StorageKind.LAYER, **said, apparent_bytes=layer, real_bytes=layer)
        stock = [folder / "image" for folder in _entries(state / "disk-stock")]
        yield StorageItem(kind=StorageKind.STOCK, name="disk-stock", **count.measure(*stock))
        yield StorageItem(kind=StorageKind.BALLAST, name="ballast", **count.measure(state / "ballast"))
        for kind, folders in _FOLDERS.items():
            for folder in folders(settings):
                yield StorageItem(kind=kind, name=folder.name, **count.measure(folder))
        yield from self._programs(count)

    def _images(self, count: _Counter, records: dict[str, Record]) -> Iterator[StorageItem]:
        for path in _entries(self._settings.node_state_dir / "snapshots"):
            first, _, rest = path.name.partition("-")
            if path.name.startswith("."):  # it is being made, or goes at the daemon's next start
                yield StorageItem(kind=StorageKind.LEFTOVER, name=path.name, **count.measure(path))
            elif first in _OF_IMAGES and rest:
                state = _state(records.get(rest))
                yield StorageItem(kind=_OF_IMAGES[first], name=rest, state=state, **count.measure(path))
            else:
                yield StorageItem(kind=StorageKind.SNAPSHOT, name=path.name, **count.measure(path))

    def _programs(self, count: _Counter) -> Iterator[StorageItem]:
        for folder in _entries(self._runtimes()):
            why = self._why_old(folder)
            yield StorageItem(
                kind=StorageKind.RUNTIME, name=folder.name, needed=not why, why=why, **count.measure(folder)
            )
        with _no_set_up(self._settings) as free:
            said = {"needed": False, "why": "set-up fetches it again when it needs it"}
        if not free:
            said = {"state": "set-up is at work"}
        for folder in _entries(self._settings.cache_dir):
            yield StorageItem(kind=StorageKind.CACHE, name=folder.name, **said, **count.measure(folder))

    def _runtimes(self) -> Path:
        return self._settings.data_dir / "bin" / "runsc"

    def _why_old(self, folder: Path) -> str:
        """Empty where this version of the runtime is needed: it is the present one, or a snapshot or a process is of
        it."""
        needed = {RUNSC_VERSION} | {saved.runtime_version for saved in self._manifests()}
        if folder.name in needed or _is_run(folder):
            return ""
        return "of an earlier version; no snapshot of this instance was made with it, and nothing runs from it"

    def _manifests(self) -> list[Manifest]:
        images, found = self._kit.assembly.images, []
        for name in images.list():
            try:
                found.append(images.read(name))
            except CpuosError:
                continue  # damaged: nothing can be begun with it
        return found


@contextlib.contextmanager
def _no_set_up(settings: Settings) -> Iterator[bool]:
    """Whether no set-up is at work; then none begins meanwhile."""
    try:
        lock = (settings.data_dir / "setup.lock").open("rb")
    except FileNotFoundError:
        yield True
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _templates(count: _Counter, settings: Settings) -> Iterator[StorageItem]:
    for kind, home in (
        (StorageKind.TEMPLATE, settings.template_dir),
        (StorageKind.BUILT, settings.node_state_dir / "templates"),
        (StorageKind.PACK, settings.node_state_dir / "packs"),
    ):
        for folder in _entries(home):
            yield StorageItem(kind=kind, name=folder.name, **count.measure(folder))


def _state(record: Record | None) -> str:
    if record is None:
        return ""
    return "lost" if record.stage is Stage.DEAD else record.stage.value


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All plain files at and below it, on its own file system: no link is followed, and no mount entered."""
    waiting = [path]
    volume: int | None = None
    while waiting:
        current = waiting.pop()
        try:
            status = current.lstat()
            volume = status.st_dev if volume is None else volume
            if status.st_dev != volume:
                continue
            if stat.S_ISDIR(status.st_mode):
                waiting.extend(current.iterdir())
            elif stat.S_ISREG(status.st_mode):
                yield current, status
        except OSError:
            continue  # gone meanwhile


def _is_run(folder: Path) -> bool:
    """Whether a process runs a program from it."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if os.readlink(f"{entry.path}/exe").startswith(f"{folder}/"):
                    return True
            except OSError:
                continue
    return False
