"""Entry-point registry: built-in parts register through the same entry points as third parties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from cpuos.errors import SetupRequired

__all__ = ["RUNTIMES_GROUP", "RuntimeHost", "load_runtimes", "runtime_entry_points"]

RUNTIMES_GROUP = "cpuos.runtimes"


@dataclass(frozen=True, kw_only=True)
class RuntimeHost:
    """All that a node tells a runtime about the instance it works for; the one argument of a runtime's class."""

    instance_id: str
    """Six hex digits: every name on the host that is not below these folders starts with `cpuos-INSTANCE`."""
    data_dir: Path
    """Artifacts shared by all instances: `bin/`, `templates/`. Read only for a runtime."""
    state_dir: Path
    """The runtime's own folder (0700), kept over a reboot. Exists."""
    run_dir: Path
    """The runtime's own folder (0700), gone after a reboot. Exists."""
    bin_dir: Path | None = None
    """`bin/` of the data directory once more, on a mount of its own: a process that runs from it holds on to that
    mount, and not to the host's root with all that was mounted below it when it started."""
    programs: Mapping[str, Path] = field(default_factory=dict)
    """Where programs are that a runtime may use and does not bring along, by name; what is not there is not used."""
    rates: Mapping[str, int] = field(default_factory=dict)
    """What devices of a sandbox may do a second, by name of `runtimes.base.DeviceRates`."""
    on_oom: Callable[[str, tuple[int, ...]], None] = lambda sandbox_id, pids: None
    """Called just before a guest process is killed for memory: the sandbox, then the numbers inside it of the process
    and of its ancestors. Must not block."""


def runtime_entry_points() -> dict[str, EntryPoint]:
    """Every runtime that an installed package offers, by name."""
    return {point.name: point for point in entry_points(group=RUNTIMES_GROUP)}


def load_runtimes(host: RuntimeHost, *, names: Iterable[str]) -> dict[str, Any]:
    """Make the named runtimes. Only what the node's settings name is ever imported."""
    found = runtime_entry_points()
    runtimes = {}
    for name in names:
        point = found.get(name)
        if point is None:
            raise SetupRequired(
                f"cannot load runtime: {name!r}",
                f"no installed package offers it; there are: {', '.join(sorted(found)) or 'none'}",
                code="runtime_unavailable",
                hint="cpuos doctor",
            )
        runtimes[name] = point.load()(_own_folders(host, name=name))
    return runtimes


def _own_folders(host: RuntimeHost, *, name: str) -> RuntimeHost:
    own = replace(host, state_dir=host.state_dir / name, run_dir=host.run_dir / name)
    for folder in (own.state_dir, own.run_dir):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return own
