"""The OCI spec and the flags of a sandbox. What is not named here, the guest does not get."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

from cpuos.runtimes.base import SandboxSpec

__all__ = ["AGENT_TASKS", "host_processes", "layer_mib", "runsc_flags", "tmp_mib", "write_bundle"]

# What root in the guest may do. No SYS_ADMIN (mounts, and forks over the process limit) and no SYS_RESOURCE (lifts
# RLIMIT_NPROC); with these sudo, apt, chroot and debuggers work.
_CAPABILITIES = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_IPC_LOCK",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
    "CAP_SYS_NICE",
    "CAP_SYS_PTRACE",
]
_CPU_PERIOD_US = 100_000
_AGENT_FOLDER = "/.cpuos"
AGENT_TASKS = 48
"""Room for PID 1's own threads on top of the sandbox's process limit, which counts threads too."""
_OPEN_FILES = 1 << 20
# The agent's alone; programs get one that it makes. With one processor its Go runtime starts some milliseconds sooner,
# for it makes fewer threads; the agent takes more once it has answered.
_AGENT_ENVIRONMENT = [
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/root",
    "GOMAXPROCS=1",
]


def runsc_flags(*, root: Path, overlay: Path, log: Path, panic_log: Path) -> list[str]:
    """Flags before the verb, the same for every verb on this sandbox."""
    return [
        *("--root", str(root), "--log", str(log), "--log-format", "json", "--panic-log", str(panic_log)),
        *("--platform", "systrap", "--network", "sandbox"),
        # The spec's annotation says that the root layer is on disk and how big; only this flag says where.
        *("--overlay2", f"root:dir={overlay}"),
        # Nobody but the sentry changes the binds while it runs.
        *("--file-access-mounts", "exclusive"),
        *("--allow-suid", "--in-sandbox-cgroup", "v2"),
    ]


def write_bundle(spec: SandboxSpec, *, cgroups_path: str) -> Path:
    """Write `bundle/` below the sandbox's folder."""
    bundle = spec.workdir / "bundle"
    (bundle / "rootfs").mkdir(mode=0o700, parents=True, exist_ok=True)
    (bundle / "config.json").write_text(json.dumps(_oci_spec(spec, bundle=bundle, cgroups_path=cgroups_path)))
    return bundle


def _oci_spec(spec: SandboxSpec, *, bundle: Path, cgroups_path: str) -> dict[str, Any]:
    """The whole spec; runsc takes the root from the EROFS annotations, not from `rootfs/`."""
    return {
        "ociVersion": "1.2.0",
        "hostname": spec.hostname,
        "process": _process(spec),
        "root": {"path": str(bundle / "rootfs")},
        "mounts": _mounts(spec),
        "annotations": {
            "dev.gvisor.spec.rootfs.source": str(spec.template_image),
            "dev.gvisor.spec.rootfs.type": "erofs",
            # Says that the layer is on disk; a flag says where. It must be the same in all sandboxes, see `_process`.
            "dev.gvisor.spec.rootfs.overlay": "dir=/overlay",
            "dev.gvisor.spec.rootfs.options": f"size={layer_mib(spec.disk_mib)}m",
        },
        "linux": {
            "cgroupsPath": cgroups_path,
            "resources": _resources(spec),
            # No cgroup namespace: with one the sentry crashes when pids.max is written (gvisor.md 5).
            "namespaces": [
                {"type": "pid"},
                {"type": "ipc"},
                {"type": "uts"},
                {"type": "mount"},
                {"type": "network", "path": str(spec.netns)},
            ],
        },
    }


def layer_mib(disk_mib: int) -> int:
    """Limit of the root's writable layer. gVisor takes its bookkeeping out of it: 1 % more keeps the number usable."""
    return disk_mib + max(1, disk_mib // 100)


def host_processes(max_processes: int) -> int:
    """Limit of the sentry and its stubs on the host. A process of the guest was seen to take 1.6 of them as it sleeps,
    and 3.7 in a fork bomb."""
    return max_processes * 4 + 1024


def tmp_mib(memory_mib: int) -> int:
    """What /tmp may hold, and /dev/shm again: both lie in memory, and a program's end does not empty them."""
    return max(16, memory_mib // 4)


def _process(spec: SandboxSpec) -> dict[str, Any]:
    """What is here, but for the environment, must be equal in a sandbox and in those that go on from its image
    (gVisor's specutils/restore.go): the template's, the sizes' and the node's, and nothing of the sandbox's own."""
    tasks = spec.max_processes + AGENT_TASKS
    key = base64.b64encode(spec.node_public_key).decode()
    return {
        "user": {"uid": 0, "gid": 0},
        "args": [f"{_AGENT_FOLDER}/cpuos-agent", "--node-key", key],
        "env": [*_AGENT_ENVIRONMENT, f"CPUOS_SANDBOX={spec.id}"],
        "cwd": "/",
        "capabilities": {kind: _CAPABILITIES for kind in ("bounding", "effective", "permitted")},
        "rlimits": [
            # The sandbox's own pids.max is the limit; this one stays when a hostile root lifts that.
            {"type": "RLIMIT_NPROC", "soft": tasks, "hard": tasks},
            {"type": "RLIMIT_NOFILE", "soft": _OPEN_FILES, "hard": _OPEN_FILES},
        ],
        "noNewPrivileges": False,
    }


def _mounts(spec: SandboxSpec) -> list[dict[str, Any]]:
    shared_memory_mib = tmp_mib(spec.memory_mib)
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        # Without a size a memory file system takes half of the host's memory (gvisor.md 1).
        {
            "destination": "/tmp",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": [f"size={shared_memory_mib}m", "mode=1777"],
        },
        {
            "destination": "/dev/shm",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": [f"size={shared_memory_mib}m", "mode=1777"],
        },
        {"destination": "/sys/fs/cgroup", "type": "cgroup2", "source": "cgroup2", "options": ["ro"]},
        {"destination": _AGENT_FOLDER, "type": "bind", "source": str(spec.agent), "options": ["ro", "rbind"]},
        {
            "destination": "/workspace",
            "type": "bind",
            "source": str(spec.disk / "workspace"),
            "options": ["rw", "rbind"],
        },
        # The sentry reads these itself, from the file that it is given: the host mounts nothing.
        *(
            {"destination": path, "type": "erofs", "source": str(image), "options": ["ro"]}
            for path, image in spec.packs
        ),
    ]


def _resources(spec: SandboxSpec) -> dict[str, Any]:
    cpu: dict[str, Any] = {
        "shares": min(1024 * spec.cpu, 262144),
        "quota": spec.cpu * _CPU_PERIOD_US,
        "period": _CPU_PERIOD_US,
    }
    if spec.cpu == 1:
        # A quota never shows the guest fewer than two CPUs; a set of one does (gvisor.md 8).
        cpu["cpus"] = str(_one_cpu(spec.id))
    return {
        "memory": {"limit": spec.memory_mib << 20},
        "cpu": cpu,
        # Host threads of the sentry and its stubs: far above what the guest's own limit can cause.
        "pids": {"limit": host_processes(spec.max_processes)},
    }


def _one_cpu(sandbox_id: str) -> int:
    """Spread sandboxes of one CPU over the host's by their random ids."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[int(sandbox_id, 36) % len(allowed)]
