"""Two installations on one machine: neither takes the other's run directory or ports, and the settings are named."""

from __future__ import annotations

import errno
import os
import shlex
import socket
from pathlib import Path

from cpuos.errors import Conflict
from cpuos.services.groups import running_sandboxes
from cpuos.services.health import part_answers
from cpuos.services.parts import PARTS
from cpuos.services.processes import find_process
from cpuos.services.record import read_record
from cpuos.settings import Settings, load_settings

__all__ = ["claim_run_dir", "other_owner", "require_free_ports", "require_own_run_dir"]

_MARK = "state-directory"
_PORTS = ("api", "gateway", "preview")


def claim_run_dir(settings: Settings) -> None:
    """Write down whose it is, also where systemd starts the parts."""
    path = settings.run_dir / _MARK
    partial = path.with_name(f".{_MARK}.{os.getpid()}")
    partial.write_text(f"{os.path.realpath(settings.state_dir)}\n")
    partial.replace(path)


def other_owner(settings: Settings) -> Path | None:
    """State directory of another installation that lives in this run directory, with parts or sandboxes."""
    record = read_record(settings)
    try:
        owner = (settings.run_dir / _MARK).read_text().strip()
    except OSError:
        owner = record.settings.get("CPUOS_STATE_DIR", "") if record else ""
    if not owner or os.path.realpath(owner) == os.path.realpath(settings.state_dir):
        return None
    processes = [record.supervisor, *(part.process for part in record.parts.values())] if record else []
    lives = any(find_process(process.pid) == process for process in processes)
    lives = lives or any(part_answers(part.name, settings) for part in PARTS)
    other = load_settings(state_dir=Path(owner), run_dir=settings.run_dir)
    return Path(owner) if lives or running_sandboxes(other) else None


def require_own_run_dir(settings: Settings, *, verb: str) -> None:
    """Conflict where another installation lives in it."""
    if (owner := other_owner(settings)) is None:
        return
    if verb == "down":
        hint = f"CPUOS_STATE_DIR={shlex.quote(str(owner))} cpuos down"
    else:
        hint = f"CPUOS_RUN_DIR={shlex.quote(f'{settings.run_dir}-2')} {_other_ports(settings)} cpuos up"
    raise Conflict(
        f"cannot {'stop' if verb == 'down' else 'start'} cpuOS: another installation runs from {settings.run_dir}",
        f"its state lies in {owner}, this one's in {settings.state_dir}; each needs its own run directory and ports",
        hint=hint,
    )


def require_free_ports(settings: Settings) -> None:
    """Conflict that names the setting, where something listens on a port of ours."""
    for part in _PORTS:
        host, port = getattr(settings, f"{part}_host"), getattr(settings, f"{part}_port")
        if port and _is_taken(host, port):
            raise Conflict(
                f"cannot start cpuOS: something else listens on {host}:{port}",
                f"CPUOS_{part.upper()}_PORT is {port}; another installation, or another program, has that port",
                hint=f"{_other_ports(settings)} cpuos up",
            )


def _other_ports(settings: Settings) -> str:
    free = 7080
    words = []
    for part in _PORTS:
        host = getattr(settings, f"{part}_host")
        while _is_taken(host, free) and free < 7180:
            free += 1
        words.append(f"CPUOS_{part.upper()}_PORT={free}")
        free += 1
    return " ".join(words)


def _is_taken(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
