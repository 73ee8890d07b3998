"""Whether a paused sandbox is what it was: the disk as when it was parked, and its record at the server.

A mark is written down when it is parked: inode, size and times, which every change by way of the file system moves. A
digest of what is on it follows in the background. A resume compares the marks, which takes no time; where they differ,
as they do for a disk that was moved, the digest decides.

The server's record can be of another history than the node's: a database that was put back, or that lost its last
changes with the power. What was decided last holds where the record says so by a later version of the policy; else
what both allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import structlog

from cpuos.errors import PlatformError
from cpuos.node.images import ImageStore, pause_name
from cpuos.node.journal import Record
from cpuos.node.resources import Disks
from cpuos.node.storage.digest import only_moved
from cpuos.types.network import EffectivePolicy
from cpuos.types.node import NodeResume

__all__ = ["DiskReceipts", "other_record", "policy_to_hold"]

log = structlog.get_logger("cpuos.node")

NOTE = "workspace"
CHANGED = "/workspace as it was: its disk was changed while it was paused"
UNKNOWN = "/workspace as it was: its disk was changed before its digest was made"
_IDLE = 19


class DiskReceipts:
    """One digest at a time, at the lowest priority."""

    def __init__(self, *, disks: Disks, images: ImageStore) -> None:
        self._disks = disks
        self._images = images
        self._stop = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="disk-digest", initializer=_be_idle)

    def close(self) -> None:
        """What is under way is given up; the next daemon begins it anew."""
        self._stop.set()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def note(self, record: Record) -> None:
        """Make the digest of one that is parked, unless it is there. One that is resumed meanwhile is left alone."""
        name, mark = pause_name(record.id), record.disk_mark
        if not mark or await self._noted(record) is not None or self._stop.is_set():
            return
        with contextlib.suppress(asyncio.CancelledError):  # the daemon ends
            await asyncio.get_running_loop().run_in_executor(self._worker, self._note, record.id, name, mark)

    async def missing(self, record: Record) -> list[str]:
        """What is not as it was."""
        mark = await self._disks.mark(record.id) if record.disk_mark else ""
        if mark == record.disk_mark:
            return []
        noted = await self._noted(record)
        if noted is None and only_moved(record.disk_mark, mark):
            log.info("disk was moved before its digest was made", sandbox=record.id)
            return []
        if noted is None:
            log.error("disk changed while paused, and its digest is not known", sandbox=record.id)
            return [UNKNOWN]
        found = await asyncio.to_thread(self._disks.digest, record.id, go_on=lambda: True)
        if found == noted:
            return []
        log.error("disk changed while paused", sandbox=record.id)
        return [CHANGED]

    async def _noted(self, record: Record) -> str | None:
        """The digest that was made of it since it was parked."""
        try:
            note = await asyncio.to_thread(self._images.note, pause_name(record.id), NOTE)
        except PlatformError:  # told by the log; it is as if there was none
            return None
        return str(note["digest"]) if note is not None and note["mark"] == record.disk_mark else None

    def _note(self, sandbox_id: str, name: str, mark: str) -> None:
        try:
            digest = self._disks.digest(sandbox_id, go_on=lambda: self._still(sandbox_id, mark))
            if digest is not None and self._disks.is_marked(sandbox_id, mark):
                self._images.add_note(name, NOTE, {"mark": mark, "digest": digest})
        except OSError as problem:
            log.warning("disk's digest not made", sandbox=sandbox_id, why=str(problem))

    def _still(self, sandbox_id: str, mark: str) -> bool:
        return not self._stop.is_set() and self._disks.is_marked(sandbox_id, mark)


def policy_to_hold(kept: EffectivePolicy, asked: EffectivePolicy) -> EffectivePolicy:
    """The one that is asked for, where that was decided after what was kept; else what both allow."""
    if asked.version > kept.version:
        return asked
    return kept if asked.layers == kept.layers else kept.and_also(asked)


def other_record(record: Record, request: NodeResume) -> list[str]:
    """What the server's record has otherwise than it was at the pause, and did not change since."""
    found, kept, asked = [], record.policy, request.network
    if policy_to_hold(kept, asked) not in (asked, kept):
        versions = f"version {asked.version} is on record, and version {kept.version} held when it was paused"
        if asked.version == kept.version:
            versions = f"version {kept.version} is another on record than held when it was paused"
        found.append(f"the network policy as it was: {versions}")
    if None not in (record.labels, request.labels) and record.labels != request.labels:
        names = sorted(key for key, _ in record.labels.items() ^ request.labels.items())
        found.append(f"the labels as they were: the record has others for {', '.join(dict.fromkeys(names))}")
    for what in found:
        log.error("record is not that of the pause", sandbox=record.id, what=what)
    return found


def _be_idle() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE)
