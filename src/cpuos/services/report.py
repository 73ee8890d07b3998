"""What `cpuos status` tells."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from cpuos.services.health import ask, part_answers
from cpuos.services.ownership import other_owner
from cpuos.services.parts import PARTS
from cpuos.services.processes import find_process
from cpuos.services.record import read_record
from cpuos.settings import Settings, load_settings, read_endpoint

__all__ = ["InstanceStatus", "PartStatus", "status"]


@dataclass(frozen=True, kw_only=True)
class PartStatus:
    """One daemon."""

    name: str
    state: str
    """ready, starting (it runs and does not answer), stopped, or unknown (not ready, and only root can look)."""
    pid: int | None
    up_s: float | None
    restarts: int
    log: str


@dataclass(frozen=True, kw_only=True)
class InstanceStatus:
    """The instance; `state` is what all its parts are, or partial."""

    state: str
    supervised: bool
    """Whether a part that dies is started again."""
    api_url: str | None
    gateway_url: str | None
    previews_url: str | None
    """Of the preview domain: the names of previews stand before its host."""
    data_dir: str
    state_dir: str
    run_dir: str
    other: str | None = None
    """State directory of another installation, which runs from this run directory: the parts are its."""
    parts: list[PartStatus] = field(default_factory=list)


def status(settings: Settings | None = None) -> InstanceStatus:
    """What runs, asked of each part itself; a user who may not look into the run directory asks the server instead."""
    settings = settings or load_settings()
    if os.path.exists(settings.run_dir) and not os.access(settings.run_dir, os.R_OK | os.X_OK):
        return _status_by_server(settings)
    record, other = read_record(settings), other_owner(settings)
    parts = []
    for part in PARTS:
        known = record.parts.get(part.name) if record else None
        runs = known is not None and find_process(known.process.pid) == known.process
        # Parts that systemd started are in no record, and answer all the same.
        state = "ready" if part_answers(part.name, settings) else "starting" if runs else "stopped"
        parts.append(
            PartStatus(
                name=part.name,
                state=state,
                pid=known.process.pid if known and runs else None,
                up_s=round(time.time() - known.since, 1) if known and runs else None,
                restarts=known.restarts if known else 0,
                log=str((settings.log_dir if other is None else other / "logs") / f"{part.name}.log"),
            )
        )
    return InstanceStatus(
        state=_common_state(parts),
        supervised=bool(record and record.is_supervised),
        api_url=read_endpoint(settings.server_endpoint),
        gateway_url=read_endpoint(settings.gateway_endpoint),
        previews_url=read_endpoint(settings.preview_endpoint),
        other=None if other is None else str(other),
        data_dir=str(settings.data_dir),
        state_dir=str(settings.state_dir),
        run_dir=str(settings.run_dir),
        parts=parts,
    )


def _status_by_server(settings: Settings) -> InstanceStatus:
    """From the server's own health page, which needs no key."""
    api_url = settings.api_public_url or f"http://{settings.api_host}:{settings.api_port}"
    answer, body = ask(api_url, "/v1/health") if settings.api_port else (0, None)
    told = (body.get("parts") or {}) if isinstance(body, dict) else {}
    states = {"server": "ok" if answer == 200 else "", **{name: part.get("status") for name, part in told.items()}}
    parts = [
        PartStatus(
            name=part.name,
            state="ready" if states.get(part.name) == "ok" else "unknown",
            pid=None,
            up_s=None,
            restarts=0,
            log=str(settings.log_dir / f"{part.name}.log"),
        )
        for part in PARTS
    ]
    return InstanceStatus(
        state=_common_state(parts),
        supervised=False,
        api_url=api_url if answer == 200 else None,
        gateway_url=None,
        previews_url=None,
        data_dir=str(settings.data_dir),
        state_dir=str(settings.state_dir),
        run_dir=str(settings.run_dir),
        parts=parts,
    )


def _common_state(parts: list[PartStatus]) -> str:
    states = {part.state for part in parts}
    return states.pop() if len(states) == 1 else "partial"
