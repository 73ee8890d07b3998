"""`cpuos doctor`: what this machine has, with evidence, and for what is missing the one command that mends it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cpuos.key_file import key_file
from cpuos.settings import RUNSC_VERSION, Settings, load_settings
from cpuos.setup.agent import agent_is_current
from cpuos.setup.checks import SETUP, Check, CheckState, missing, ok, warn
from cpuos.setup.golang import find_go
from cpuos.setup.host import Host
from cpuos.setup.network import look_at_network
from cpuos.setup.packages import missing_packages
from cpuos.setup.runsc import runsc_is_current, sidecars_are_current
from cpuos.setup.source import environment_is_current, environment_path, readable_python
from cpuos.setup.templates import TEMPLATES, Template, template_is_current
from cpuos.setup.users import USERS, users_exist
from cpuos.setup.volume import is_mounted, is_unmounted, volume_image

if TYPE_CHECKING:
    from cpuos.runtimes.microvm.probe import Prober

__all__ = ["Check", "CheckState", "doctor", "doctor_lines"]

MINIMUM_FREE_MIB = 4096
MINIMUM_MEMORY_MIB = 2048
_FICLONE = 0x40049409  # linux/fs.h


def doctor(settings: Settings | None = None, *, probe: bool = True) -> list[Check]:
    """Look at everything; changes nothing. With `probe` a test sandbox is booted, where root asks."""
    settings = settings or load_settings()
    with open(os.devnull, "w") as log:
        host = Host(settings, log=log, environment=environment_path(settings))
        checks = [look(host) for look in _LOOKS]
        checks += [_look_at_template(host, template) for template in TEMPLATES if _is_wanted(host, template)]
        checks += look_at_network(host)
        if probe:
            checks += [_probe(host), _probe_microvm(host)]
        checks += _look_at_services(settings)
    return checks


def doctor_lines(checks: list[Check]) -> list[str]:
    """The checks as text, and what to do next."""
    width = max(len(check.name) for check in checks)
    marks = {CheckState.OK: "ok     ", CheckState.WARNING: "warning", CheckState.MISSING: "MISSING"}
    lines = []
    for check in checks:
        lines.append(f"{marks[check.state]}  {check.name:<{width}}  {check.evidence}")
        if check.fix:
            lines.append(f"{'':9}{'':{width}}  try: {check.fix}")
    lines.append(_next_step(checks))
    return lines


def _next_step(checks: list[Check]) -> str:
    lacking = [check for check in checks if check.state is CheckState.MISSING]
    if lacking:
        return f"{len(lacking)} missing; first: {lacking[0].fix}"
    warnings = [check for check in checks if check.state is CheckState.WARNING]
    if warnings:
        return (
            f"nothing is missing; {len(warnings)} warning{'' if len(warnings) == 1 else 's'}; first: {warnings[0].fix}"
        )
    return "everything is in place"


def _look_at_root(host: Host) -> Check:
    if os.geteuid() == 0:
        return ok("root", "running as root")
    return warn("root", "not root: some checks need it", fix="sudo cpuos doctor")


def _look_at_system(host: Host) -> Check:
    release = platform.freedesktop_os_release()
    evidence = f"{release.get('PRETTY_NAME', 'unknown')}, kernel {platform.release()}, {platform.machine()}"
    if release.get("ID") in ("debian", "ubuntu") and shutil.which("apt-get"):
        return ok("system", evidence)
    return missing("system", f"{evidence}: set-up knows Debian 12 and Ubuntu 24.04", fix="cat /etc/os-release")


def _look_at_python(host: Host) -> Check:
    try:
        python = readable_python()
    except Exception as error:
        return missing("python", str(error).splitlines()[0], fix="sudo apt-get install --yes python3")
    version = (host.read([python, "--version"]) or "unknown").strip()
    return ok("python", f"{version} at {python}, readable by the daemons' users")


def _look_at_packages(host: Host) -> Check:
    lacking = missing_packages(host)
    if not lacking:
        return ok("packages", "all system packages are installed")
    return missing("packages", f"not installed: {' '.join(lacking)}", fix=SETUP)


def _look_at_users(host: Host) -> Check:
    if users_exist(host):
        return ok("users", f"{', '.join(USERS)} in group cpuos")
    return missing("users", f"one of {', '.join(USERS)} or the group cpuos does not exist", fix=SETUP)


def _look_at_environment(host: Host) -> Check:
    if environment_is_current(host):
        return ok("environment", f"cpuOS is installed in {host.environment}")
    return missing("environment", f"this version of cpuOS is not installed below {host.settings.venv_dir}", fix=SETUP)


def _look_at_runsc(host: Host) -> Check:
    path = host.settings.runsc_path
    if runsc_is_current(host):
        return ok("runsc", f"{RUNSC_VERSION} at {path}")
    if not path.exists():
        return missing("runsc", f"not at {path}", fix=SETUP)
    said = (host.read([path, "--version"]) or "it does not start").splitlines()[0]
    return missing("runsc", f"{path} says {said!r}, wanted is {RUNSC_VERSION}", fix=SETUP)


def _look_at_sidecars(host: Host) -> Check:
    if sidecars_are_current(host):
        return ok("sidecars", f"in {host.settings.runsc_path.parent / 'gvisor-bin'}")
    return warn("sidecars", "gVisor's start-up helpers are missing: sandboxes start 20 ms later", fix=SETUP)


def _look_at_agent(host: Host) -> Check:
    if agent_is_current(host):
        return ok("agent", str(host.settings.agent_path))
    exists = host.settings.agent_path.exists()
    evidence = "built from other sources than these" if exists else f"not at {host.settings.agent_path}"
    needs_go = "" if find_go(host) else "; Go will be installed"
    return missing("agent", evidence + needs_go, fix=SETUP)


def _look_at_groups(host: Host, root: Path = Path("/sys/fs/cgroup")) -> Check:
    wanted = {"cpu", "cpuset", "memory", "pids"}
    if (root / "cgroup.controllers").exists():
        version, found = "v2", set((root / "cgroup.controllers").read_text().split())
    else:
        version, found = "v1", {path.name for path in root.iterdir() if path.is_dir()} if root.is_dir() else set()
    lacking = sorted(wanted - found)
    if not lacking:
        return ok("control groups", f"{version} with {', '.join(sorted(wanted))}")
    return missing(
        "control groups", f"{version} without {', '.join(lacking)}", fix="mount -t cgroup2 none /sys/fs/cgroup"
    )


def _look_at_loop_devices(host: Host) -> Check:
    free = (host.read(["losetup", "--find"]) or "").strip()
    if free:
        return ok("loop devices", f"next free: {free}")
    if os.geteuid() != 0:
        return warn("loop devices", "only root can ask for a free one", fix="sudo cpuos doctor")
    return missing("loop devices", "none to be had; sandboxes' disks need them", fix="modprobe loop")


def _look_at_disk(host: Host) -> Check:
    settings = host.settings
    place = next(path for path in (settings.state_dir, *settings.state_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free >> 20
    kind = (host.read(["stat", "--file-system", "--format", "%T", place]) or "unknown").strip()
    evidence = f"{free / 1024:.1f} GiB free at {place} ({kind})"
    if free >= MINIMUM_FREE_MIB:
        return ok("disk space", evidence)
    return warn("disk space", f"{evidence}; at least {MINIMUM_FREE_MIB >> 10} GiB is wanted", fix=f"df -h {place}")


def _look_at_volume(host: Host) -> Check:
    """Whether copies share blocks where the data lies, and how to have it."""
    settings, name = host.settings, "data volume"
    image = volume_image(settings)
    if is_unmounted(settings):
        return missing(name, f"the data lies in {image}, which is not mounted", fix="sudo cpuos up")
    if is_mounted(settings):
        return ok(name, f"{image}, {image.stat().st_size >> 20} MiB, XFS: snapshots and forks share blocks")
    place = next(path for path in (settings.state_dir, *settings.state_dir.parents) if path.exists())
    if _shares_blocks(place):
        return ok(name, f"{place}: snapshots and forks share blocks")
    wanted = "sudo cpuos setup storage --reflink-volume 100GiB"
    return ok(name, f"{place}: snapshots and forks are copies; to have them share blocks: {wanted}")


def _shares_blocks(place: Path) -> bool | None:
    """Whether a copy of a file there shares its blocks: tried with files that have no name. None: that is forbidden."""
    try:
        with tempfile.TemporaryFile(dir=place) as source, tempfile.TemporaryFile(dir=place) as target:
            source.write(bytes(4096))
            source.flush()
            try:
                fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
            except OSError:
                return False
            return True
    except OSError:
        return None


def _look_at_memory(host: Host) -> Check:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) >> 10
    evidence = f"{available} MiB available, {os.cpu_count()} processors"
    if available >= MINIMUM_MEMORY_MIB:
        return ok("memory", evidence)
    return warn("memory", f"{evidence}; at least {MINIMUM_MEMORY_MIB} MiB is wanted", fix="free -m")


_LOOKS: tuple[Callable[[Host], Check], ...] = (
    _look_at_root,
    _look_at_system,
    _look_at_python,
    _look_at_packages,
    _look_at_users,
    _look_at_environment,
    _look_at_runsc,
    _look_at_sidecars,
    _look_at_agent,
    _look_at_groups,
    _look_at_loop_devices,
    _look_at_disk,
    _look_at_volume,
    _look_at_memory,
)


def _image_of(host: Host, template: Template) -> Path:
    return host.settings.template_dir / template.name / "root.erofs"


def _is_wanted(host: Host, template: Template) -> bool:
    return template.standard or _image_of(host, template).exists()


def _look_at_template(host: Host, template: Template) -> Check:
    name, image = template.name, _image_of(host, template)
    if template_is_current(host, template):
        return ok(f"template {name}", f"{image.stat().st_size >> 20} MiB at {image}")
    evidence = "built from another definition" if image.exists() else f"not at {image}"
    return missing(f"template {name}", evidence, fix=SETUP if template.standard else f"{SETUP} --template {name}")


def _probe(host: Host) -> Check:
    """Boot something and wait for its word: a binary that exists proves nothing."""
    from cpuos.runtimes.gvisor.probe import probe_gvisor
    from cpuos.runtimes.gvisor.program import Runsc

    if os.geteuid() != 0:
        return warn("test boot", "only root can boot a sandbox", fix="sudo cpuos doctor")
    with tempfile.TemporaryDirectory(prefix="cpuos-doctor-") as folder:
        runsc = Runsc(host.settings.runsc_path, root=Path(folder) / "runsc")
        found = asyncio.run(probe_gvisor(runsc, folder=Path(folder)))
        host.read(["umount", "--lazy", runsc.root / "null-netns"])  # runsc leaves it for the next sandbox
    if found.available:
        return ok("test boot", found.detail)
    return missing("test boot", found.reason, fix=SETUP)


def _probe_microvm(host: Host) -> Check:
    """The level that microVMs give here, and what was seen. Kept findings are not believed."""
    from cpuos.runtimes.microvm.probe import Prober, candidates

    name, image = "microvm", host.settings.microvm_dir
    if not (image / "manifest.json").exists():
        return ok(name, "not set up, sandboxes run in gVisor; to have them: sudo cpuos setup microvm")
    if os.geteuid() != 0:
        return warn(name, "only root can boot a machine", fix="sudo cpuos doctor")
    with tempfile.TemporaryDirectory(prefix="cpuos-doctor-") as folder:
        kept, work = Path(folder) / "probe.json", Path(folder) / "probe"
        prober = Prober(image, kept=kept, folder=work, vmms=candidates(host.settings.vmm_programs), fresh=True)
        found = asyncio.run(_ask_prober(prober))
    if isinstance(found, str):
        return warn(name, found, fix=f"{SETUP} microvm")
    level, seen = found
    return ok(name, f"level {level}; {seen}")


async def _ask_prober(prober: Prober) -> tuple[str, str] | str:
    """Level and evidence, or why there is none."""
    probe = await prober.probe()
    if not probe.available:
        return probe.reason
    seen = "; ".join(
        f"{finding.vmm} {'kvm' if finding.kvm else 'tcg'}: {finding.evidence}" for finding in await prober.findings()
    )
    return f"{probe.isolation} ({probe.detail})", seen


def _look_at_services(settings: Settings) -> Iterator[Check]:
    from cpuos.services import status

    found = status(settings)
    for part in found.parts:
        evidence = f"{part.state}, process {part.pid}, restarted {part.restarts} times" if part.pid else part.state
        if part.state == "ready":
            yield ok(part.name, evidence)
        elif os.geteuid() != 0:
            yield warn(part.name, "only root can look", fix="sudo cpuos doctor")
        else:
            fix = "sudo cpuos up" if part.state == "stopped" else f"tail -n 50 {part.log}"
            yield warn(part.name, evidence, fix=fix)
    yield _look_at_key(settings, api_url=found.api_url)
    if os.geteuid() == 0 and any(part.name == "node" and part.state == "ready" for part in found.parts):
        yield _look_at_pool(settings)


def _look_at_key(settings: Settings, *, api_url: str | None) -> Check:
    """Whether this user's client finds a key, and whether it works where the server can be asked."""
    from cpuos.services.credentials import read_credentials
    from cpuos.services.health import ask

    path, given = key_file(run_dir=settings.run_dir), os.environ.get("CPUOS_API_KEY", "")
    place = "CPUOS_API_KEY" if given else str(path)
    key = given or read_credentials(path).get("api_key", "")
    fix = "unset CPUOS_API_KEY" if given else "sudo cpuos up"
    if not key:
        return warn("key", f"this user has none: not in CPUOS_API_KEY, nor in {path}", fix=fix)
    if api_url is not None and ask(api_url, "/v1/sandboxes", key=key)[0] == 401:
        return warn("key", f"the server does not know the one in {place}", fix=fix)
    return ok("key", f"in {place}")


def _look_at_pool(settings: Settings) -> Check:
    from cpuos.services.health import ask

    _, pool = ask(settings.node_socket, "/v1/pool")
    if not isinstance(pool, dict) or "budget_mib" not in pool:
        return warn("pool", "the node does not tell of it", fix="sudo cpuos status")
    if not pool["budget_mib"]:
        return ok("pool", "no sandbox is started ahead (pool_memory_mib = 0)")
    taken, asked = pool["taken"], pool["taken"] + pool["missed"]
    evidence = f"{len(pool['ready'])} sandboxes ready, {pool['memory_mib']} of {pool['budget_mib']} MiB"
    return ok("pool", f"{evidence}, taken by {taken} of {asked} creates")
