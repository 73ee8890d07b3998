"""Proof that gVisor works on this host: something is booted, and its word is waited for."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from pathlib import Path

from cpuos.errors import CpuosError
from cpuos.runtimes.base import Probe
from cpuos.runtimes.gvisor.program import Runsc
from cpuos.runtimes.gvisor.version import RUNSC_VERSION, has_pinned_version
from cpuos.types.sandbox import Isolation

__all__ = ["probe_gvisor"]

_BOOT_S = 20.0
_WORD = "runsc version"
_FLAGS = ("--platform", "systrap", "--network", "none", "--ignore-cgroups", "--overlay2", "none")


async def probe_gvisor(runsc: Runsc, *, folder: Path) -> Probe:
    """Boot a sandbox whose only program is runsc itself, a static one that is there anyway."""
    refusal = await asyncio.to_thread(_refusal, runsc.program)
    if refusal:
        return _unavailable(refusal)
    name = f"probe{secrets.token_hex(6)}"
    bundle = folder / name
    try:
        _write_bundle(bundle, program=runsc.program)
        outcome = await runsc.call(*_FLAGS, "run", "-bundle", str(bundle), name, timeout_s=_BOOT_S)
    except CpuosError as problem:
        return _unavailable(f"a test boot failed: {problem.why}; run `cpuos doctor`")
    except OSError as problem:
        return _unavailable(f"a test boot failed: {problem}; run `cpuos doctor`")
    finally:
        await _clean_up(runsc, name=name, bundle=bundle)
    if outcome.returncode != 0 or _WORD not in outcome.output:
        return _unavailable(f"a test boot ended with {outcome.returncode}: {outcome.output[-500:]}; run `cpuos doctor`")
    return Probe(available=True, isolation=Isolation.GVISOR, detail=f"gVisor {RUNSC_VERSION}, systrap platform")


def _refusal(program: Path) -> str:
    if os.geteuid() != 0:
        return "gVisor sandboxes need root on the node; run `sudo cpuos up`"
    if not program.exists():
        return f"runsc is not installed at {program}; run `cpuos up`"
    sentry = program.parent / "gvisor-bin" / "gvisor_sentry"
    for part in (program, sentry):
        if part.exists() and not has_pinned_version(part):
            return f"{part} is not gVisor {RUNSC_VERSION}, the version this release works with; run `cpuos up`"
    return ""


def _unavailable(reason: str) -> Probe:
    return Probe(available=False, isolation=Isolation.GVISOR, detail="", reason=reason)


def _write_bundle(bundle: Path, *, program: Path) -> None:
    (bundle / "rootfs").mkdir(mode=0o700, parents=True)
    spec = {
        "ociVersion": "1.2.0",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/probe/runsc", "--version"], "cwd": "/", "env": ["HOME=/"]},
        # Read-only would be a second mount of it, and that is refused where the first one has flags, as /run has.
        "root": {"path": str(bundle / "rootfs"), "readonly": False},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/probe",
                "type": "bind",
                "source": str(program.parent),
                "options": ["ro", "rbind", *_locked_flags(program)],
            },
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }
    (bundle / "config.json").write_text(json.dumps(spec))


def _locked_flags(place: Path) -> list[str]:
    """Flags of the mount that it lies in. A sandbox has a user namespace of its own, in which the kernel lets none of
    them go (mount_namespaces(7)): a mount that does not ask for them is refused."""
    flags = os.statvfs(place).f_flag
    names = {os.ST_NOSUID: "nosuid", os.ST_NODEV: "nodev", os.ST_NOEXEC: "noexec"}
    return [name for flag, name in names.items() if flags & flag]


async def _clean_up(runsc: Runsc, *, name: str, bundle: Path) -> None:
    try:
        await runsc.call("delete", "-force", name, timeout_s=_BOOT_S)
    except CpuosError:
        pass
    await asyncio.to_thread(shutil.rmtree, bundle, ignore_errors=True)
