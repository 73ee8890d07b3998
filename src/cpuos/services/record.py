"""What the supervisor writes down, for `up`, `down`, `status` and the supervisor after it: who runs, since when."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cpuos.services.processes import Process, find_process
from cpuos.settings import Settings

__all__ = ["PartRecord", "Record", "read_record", "record_path", "write_record"]


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """A running daemon."""

    process: Process
    since: float
    """Unix time of its start."""
    restarts: int
    """How often it was started again since the supervisor began."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The supervisor and its parts."""

    supervisor: Process
    python: str
    """The interpreter, and by its path the version of the code, that all of them run."""
    settings: dict[str, str]
    parts: dict[str, PartRecord] = field(default_factory=dict)

    @property
    def is_supervised(self) -> bool:
        """Whether the supervisor lives."""
        return find_process(self.supervisor.pid) == self.supervisor


def record_path(settings: Settings) -> Path:
    """In the run directory: it means nothing after a reboot."""
    return settings.run_dir / "parts.json"


def read_record(settings: Settings) -> Record | None:
    """The last record; None when there is none that can be read."""
    try:
        data = json.loads(record_path(settings).read_text())
        parts = {
            name: PartRecord(process=Process(**part["process"]), since=part["since"], restarts=part["restarts"])
            for name, part in data["parts"].items()
        }
        supervisor = Process(**data["supervisor"])
        return Record(supervisor=supervisor, python=data["python"], settings=data["settings"], parts=parts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_record(settings: Settings, record: Record) -> None:
    """Whole or not at all."""
    path = record_path(settings)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(asdict(record), indent=1))
    partial.chmod(0o640)
    partial.replace(path)
