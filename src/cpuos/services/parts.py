"""The three daemons of an instance: what each runs as, and how it is started."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cpuos.services.processes import Process, find_process
from cpuos.settings import Settings

__all__ = ["PARTS", "Part", "limit_memory", "spawn_part"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One daemon: `python -m MODULE`, as `user`, within `memory_mib`."""

    name: str
    module: str
    user: str
    memory_mib: int | None
    """None: no limit. The node's helpers start sandboxes, so its memory must not be what is short."""


PARTS = (
    Part(name="node", module="cpuos.node", user="root", memory_mib=None),
    Part(name="server", module="cpuos.server", user="cpuos-server", memory_mib=1024),
    Part(name="gateway", module="cpuos.gateway", user="cpuos-gateway", memory_mib=1024),
)
"""In the order of their start."""


def spawn_part(part: Part, settings: Settings, *, python: Path) -> tuple[subprocess.Popen[bytes], Process]:
    """Start it in a session of its own: output appended to its log, a clean environment, its user's rights only."""
    log = os.open(settings.log_dir / f"{part.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        started = subprocess.Popen(
            [*_drop_rights(part), str(python), "-m", part.module],
            cwd="/",
            env={**_BASE_ENVIRONMENT, **settings.environment()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            umask=0o077,
            start_new_session=True,
        )
    finally:
        os.close(log)
    process = find_process(started.pid) or Process(pid=started.pid, started=0)
    limit_memory(part, process, instance_id=settings.instance_id)
    return started, process


def limit_memory(part: Part, process: Process, *, instance_id: str, root: Path = Path("/sys/fs/cgroup")) -> None:
    """Put a fresh process into a memory group of its part's size, in cgroup v1 or v2; a host without is no error."""
    if part.memory_mib is None:
        return
    version_1 = (root / "memory").is_dir()
    group = (root / "memory" if version_1 else root) / f"cpuos-{instance_id}-parts" / part.name
    try:
        if not version_1:
            (root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir(parents=True, exist_ok=True)
        if not version_1:
            (group.parent / "cgroup.subtree_control").write_text("+memory")
        limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
        limit.write_text(str(part.memory_mib << 20))
        (group / "cgroup.procs").write_text(str(process.pid))
    except OSError:
        return


# Nothing of the caller's environment: it may hold secrets, and daemons must not differ by who started them.
_BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/",
    "PYTHONUNBUFFERED": "1",
}


def _drop_rights(part: Part) -> list[str]:
    if part.user == "root":
        return []
    return [
        *("setpriv", "--reuid", part.user, "--regid", "cpuos", "--clear-groups"),
        *("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"),
    ]
