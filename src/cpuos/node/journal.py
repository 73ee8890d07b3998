"""The node's own memory: one small file a sandbox, on disk before each stage, so that a killed daemon finds
everything again. It holds ids and numbers; paths are derived from them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from cpuos.durable import sync_folder
from cpuos.runtimes.base import Process
from cpuos.types.network import EffectivePolicy
from cpuos.types.node import NodeSandboxCreate, Restored, Usage
from cpuos.types.sandbox import SANDBOX_ID_PATTERN, Isolation, StartedFrom

__all__ = ["Journal", "Loaded", "Record", "Stage"]

log = structlog.get_logger("cpuos.node")


class Stage(StrEnum):
    CREATING = "creating"
    READY = "ready"  # it runs, nobody has asked for it yet, and the create that names it gets it
    RUNNING = "running"
    SAVING = "saving"  # frozen while a snapshot is made of it
    PAUSING = "pausing"  # frozen while its image is made
    PAUSED = "paused"  # its image is whole; all else but files is removed or being removed
    RESUMING = "resuming"
    DEAD = "dead"  # its process ended; all else of it but its files is removed or being removed
    DELETING = "deleting"
    GONE = "gone"  # deleted; kept for a while as a fence against late calls


class Record(BaseModel):
    """What the node knows of one sandbox. The file is 0600: it holds the session key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    request: NodeSandboxCreate
    stage: Stage
    boot_id: str
    changed_at: datetime
    session_key: str = field(repr=False)
    """Hex; random for each sandbox and generation."""
    template_digest: str = ""
    isolation: Isolation = Isolation.NONE
    isolation_detail: str = ""
    network: EffectivePolicy | None = None
    """The newest policy, on disk before it is in force; None: the one of the request."""
    process: Process | None = None
    started_at: datetime | None = None
    started_from: StartedFrom = StartedFrom.COLD
    exit_reason: str = ""
    ended: bool = False
    """Its resources on the host are removed; of a dead one its files are kept."""
    parked: bool = False
    """It is paused and only files of it are left."""
    pause_reason: str = ""
    """Why it is paused, where nobody asked for it."""
    unsettled: bool = False
    """It was resumed and nobody has said yet that it answers: the image is kept."""
    told: bool = False
    """Of an unsettled one: its guest may have been told to go on, so its disk may be newer than the image's memory."""
    memory_stale: bool = False
    """Of a paused one: that was so when it ended. Its processes would go back in time against their own files."""
    incarnation: int = 0
    """How often its processes were taken up again, or may have been."""
    thaw: str = ""
    """What its guest may be frozen with, and says to it that it may go on."""
    thaw_from: str = ""
    """The sandbox that was frozen with it."""
    restored: Restored = Restored.NOTHING
    restored_at: datetime | None = None
    """When what it began with was saved."""
    used: Usage = Usage()
    """By its processes of before its last pause."""
    disk_mark: str = ""
    """Of a parked one: by it a disk that was changed since is known without being read. Empty: it is not known."""
    labels: dict[str, str] | None = None
    """Of a paused one: those that its record had then; None: nobody has told."""
    missing: list[str] = []
    """What was not as it had been when it was taken up all the same."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def generation(self) -> int:
        return self.request.generation

    @property
    def policy(self) -> EffectivePolicy:
        """The network policy that is to be in force."""
        return self.network or self.request.network

    @property
    def packs(self) -> set[str]:
        """Images of data packs that it has."""
        return set(self.request.packs.values())

    def becomes(self, stage: Stage, **changes: object) -> Record:
        return self.model_copy(update={"stage": stage, **changes})


@dataclass(frozen=True, kw_only=True)
class Loaded:
    records: list[Record]
    unreadable: list[str]
    """Ids whose file says nothing usable; it was set aside."""


class Journal:
    """Records in one folder (0700). Every write is whole or not at all, and on disk when it returns.

    Without `sync` it surely outlives this daemon, but not the host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def load(self) -> Loaded:
        records, unreadable = [], []
        for path in self._files():
            try:
                record = Record.model_validate_json(path.read_bytes())
                if record.id != path.stem:
                    raise ValueError(f"the file names {record.id}")
            except (OSError, ValueError, ValidationError) as error:
                log.error("journal record unreadable", sandbox=path.stem, error=str(error))
                path.replace(path.with_suffix(".unreadable"))
                unreadable.append(path.stem)
            else:
                records.append(record)
        return Loaded(records=records, unreadable=unreadable)

    def write(self, record: Record, *, sync: bool = True) -> None:
        path = self._path(record.id)
        draft = path.with_suffix(".draft")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(draft, flags, 0o600)
        try:
            os.write(descriptor, record.model_dump_json().encode())
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(draft, path)
        if sync:
            sync_folder(self._folder)

    def remove(self, sandbox_id: str) -> None:
        self._path(sandbox_id).unlink(missing_ok=True)
        sync_folder(self._folder)

    def _path(self, sandbox_id: str) -> Path:
        if re.fullmatch(SANDBOX_ID_PATTERN, sandbox_id) is None:
            raise ValueError(f"not a sandbox id: {sandbox_id!r}")
        return self._folder / f"{sandbox_id}.json"

    def _files(self) -> Iterator[Path]:
        for path in sorted(self._folder.iterdir()):
            if path.suffix == ".draft":
                path.unlink()
            elif path.suffix == ".json" and re.fullmatch(SANDBOX_ID_PATTERN, path.stem):
                yield path
