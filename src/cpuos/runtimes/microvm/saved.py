"""What is written down of a machine: of one that runs, in its folder, and of one that is saved, in its image.

    IMAGE/machine.json   which version made it, and whether its memory is a file
    IMAGE/state          what its devices are, by the VMM; and its memory, where that is no file
    IMAGE/ram            its memory, sparse
    IMAGE/layer.image    the root's writable layer at the same moment

All but the first is bytes to this host: the VMM in its jail reads them, and the guest's kernel.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cpuos.errors import CapacityExceeded, PlatformError
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.microvm.launch import guest_memory_mib
from cpuos.runtimes.microvm.memory import copy_file, copy_memory, held_memory, make_memory
from cpuos.runtimes.microvm.vmm import Memory, Vmm

__all__ = [
    "MEMORY",
    "SAVES",
    "STATE",
    "Facts",
    "kind_for",
    "open_memory",
    "read_facts",
    "save",
    "save_layer",
    "save_machine",
    "take_layer",
    "write_facts",
]

STATE, MEMORY = "state", "ram"
SAVES = "saves"
"""The folder of a machine, in that of its sandbox, that its VMM saves to, where it does so by itself."""
_LAYER, _SAVED, _FACTS = "layer.image", "machine.json", "vm.json"
# What the devices of a machine are: some hundred kB.
_STATE_BYTES = 64 << 20
# Many GiB of memory on a slow volume.
_SAVE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of one that runs."""

    uid: int
    version: str
    """Of what it was started as: only the same takes it up."""
    memory: Memory


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / _FACTS).write_text(json.dumps(vars(facts)))


def read_facts(folder: Path) -> Facts:
    """Raises OSError."""
    try:
        told = json.loads((folder / _FACTS).read_text())
        return Facts(uid=int(told["uid"]), version=str(told["version"]), memory=Memory(told["memory"]))
    except (ValueError, KeyError, TypeError) as problem:
        raise OSError(f"{_FACTS} cannot be read") from problem


def kind_for(image: Path, *, version: str) -> Memory:
    """How a machine that goes on from this image holds its memory. Raises where it is not of this version."""
    try:
        told = json.loads((image / _SAVED).read_text())
        made_by, has_memory = str(told["version"]), bool(told["has_memory"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        why = "it does not say of which machine it is"
        raise PlatformError("cannot restore a microVM", why, code="snapshot_damaged") from problem
    if made_by != version:
        why = f"it was saved by {made_by}, and this node has {version}"
        raise PlatformError("cannot restore a microVM", why, code="snapshot_incompatible")
    # A file of it is mapped as it is; else it is in the stream, and needs a file to go to.
    return Memory.PRIVATE if has_memory else Memory.SHARED


def save(sandbox_id: str, image: Path, write: Callable[[], None]) -> None:
    """Write into the new folder `image`; after a failure there is none."""
    try:
        image.mkdir(mode=0o700)
        write()
    except BaseException as problem:
        shutil.rmtree(image, ignore_errors=True)
        if not isinstance(problem, OSError):
            raise
        what = f"cannot save sandbox {sandbox_id}"
        if problem.errno == errno.ENOSPC:
            raise CapacityExceeded(what, "the node's data volume has no room") from problem
        raise PlatformError(what, str(problem)) from problem


def save_machine(
    image: Path, vmm: Vmm, facts: Facts, *, control: Path, pidfd: int, spec: SandboxSpec, layer: Path
) -> None:
    """Memory, devices and the layer of one moment, in which the machine stands still."""
    if vmm.saves_files:
        _save_by_itself(image, vmm, facts, control=control, saves=spec.workdir / SAVES, layer=layer)
        return
    as_file = facts.memory is Memory.SHARED

    def also() -> None:
        copy_file(layer, image / _LAYER)
        if as_file:
            memory = held_memory(pidfd, size_mib=guest_memory_mib(spec.memory_mib))
            try:
                copy_memory(memory, image / MEMORY)
            finally:
                os.close(memory)

    state = os.open(image / STATE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        limit = _STATE_BYTES if as_file else _STATE_BYTES + (guest_memory_mib(spec.memory_mib) << 20)
        vmm.save(control, state, memory=not as_file, also=also, limit_bytes=limit, timeout_s=_SAVE_S)
    finally:
        os.close(state)
    (image / _SAVED).write_text(json.dumps({"version": facts.version, "has_memory": as_file}))


def _save_by_itself(image: Path, vmm: Vmm, facts: Facts, *, control: Path, saves: Path, layer: Path) -> None:
    """It has written all when it goes on: what it wrote is a copy, and these files are the node's own."""

    def also() -> None:
        copy_file(layer, image / _LAYER)

    try:
        vmm.save(control, -1, memory=True, also=also, limit_bytes=0, timeout_s=_SAVE_S)
        for name in (STATE, MEMORY):
            copy_file(saves / name, image / name)
    finally:
        for name in (STATE, MEMORY):
            os.truncate(saves / name, 0)
    (image / _SAVED).write_text(json.dumps({"version": facts.version, "has_memory": True}))


def open_memory(size_mib: int, image: Path | None) -> int:
    """A file to be the memory: that of the image, for reading, or a new one."""
    if image is None:
        return make_memory(size_mib)
    return os.open(image / MEMORY, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def save_layer(disk: Path, image: Path) -> None:
    """It stands still meanwhile. Where its memory was saved in the same moment the layer is there already: it gets a
    second name, since what is saved is never changed."""
    for folder in image.parent.iterdir():
        if folder != image and (folder / _LAYER).exists():
            os.link(folder / _LAYER, image / _LAYER)
            return
    copy_file(disk, image / _LAYER)


def take_layer(image: Path, disk: Path) -> None:
    disk.unlink(missing_ok=True)
    copy_file(image / _LAYER, disk)
