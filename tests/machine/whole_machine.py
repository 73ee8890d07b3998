"""A machine of its own for cpuOS: a distribution with its service manager and control groups v2, in QEMU, translated.

The source that the tests stand in is laid into it, and set up by its own set-up in the distribution's root directory.
When the machine runs it has no network card, so that nothing leaves it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cpuos.settings import Settings
from machine.distribution import Release, base, cache, find_sources, run

__all__ = ["COUNTED", "PARALLEL", "boot", "build_disk", "check_names", "what_is_lacking"]

ROOT = Path(__file__).parents[2]
FOLDER = "/opt/cpuos"
"""Where the source lies in the machine."""
_DISK_BYTES = 8 << 30
PARALLEL = ("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2")
"""Two processors, as fast as this machine translates."""
COUNTED = ("-accel", "tcg", "-icount", "shift=0", "-rtc", "clock=vm", "-cpu", "max,+svm,+npt")
"""One processor with SVM, whose clock counts its instructions, a thousand million a second: what is slow here does not
use up the time limits there."""
_CHECKS_UNIT = """
[Unit]
After=multi-user.target
[Service]
Type=oneshot
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
TimeoutStartSec=infinity
Environment=HOME=/root
ExecStart=/var/lib/cpuos/venv/current/bin/python {folder}/tests/machine/{checks}
ExecStopPost=/usr/bin/systemctl poweroff --no-block
"""
# In namespaces of its own, so that no mount of it is left here. Only what set-up needs of this machine: names,
# certificates, what uv has fetched before.
_WORKSHOP = """
root=$1 packages=$2
mount --bind "$root" "$root"
cd "$root"
for place in resolv.conf hosts ssl/certs/ca-certificates.crt pip.conf; do
    if [ -e "/etc/$place" ]; then
        [ -e "$root/etc/$place" ] || { rm -f "$root/etc/$place"; touch "$root/etc/$place"; }
        mount --bind "$(realpath "/etc/$place")" "$root/etc/$place"
    fi
done
mkdir -p "$root/var/lib/cpuos/cache/uv-cache"
mount --bind "$packages" "$root/var/lib/cpuos/cache/uv-cache"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/dev"
mkdir "$root/dev/shm"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root UV_PYTHON_DOWNLOADS=never
exec chroot "$root" sh -ec 'cd /opt/cpuos && make .venv/synced && .venv/bin/python tests/machine/set_up_small.py'
"""


def check_names(checks: str) -> list[str]:
    """What the script tries, in its order."""
    return re.findall(r"^def (test_\w+)", Path(__file__).with_name(checks).read_text(), re.MULTILINE)


def what_is_lacking(settings: Settings, release: Release) -> str:
    """Why no machine of this release can be made here; empty: nothing stands against it."""
    programs = ("qemu-system-x86_64", "mmdebstrap", "mkfs.ext4", "unshare", "make")
    if missing := [name for name in programs if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    if not find_sources(release):
        return f"no mirror of {release.name} is known here: /etc/apt names none, nor does CPUOS_TEST_UBUNTU_MIRROR"
    if not settings.runsc_path.is_file() or not settings.agent_path.is_file():
        return "set-up has not built runsc and the agent: make setup"
    return ""


def build_disk(
    settings: Settings,
    release: Release,
    folder: Path,
    *,
    checks: str,
    config: str = "",
    copied: Mapping[Path, str] | None = None,
) -> None:
    """`disk`, `kernel` and `initrd` in the folder. `checks`: the script beside this file that the machine runs;
    `config`: of its cpuOS; `copied`: files of this machine to places in that one."""
    root = folder / "root"
    run("cp", "-a", base(settings, release), root)
    _lay_out_source(root / FOLDER.lstrip("/"))
    for place, target in (copied or {}).items():
        _copy(place, root / target.lstrip("/"))
    _install_cpuos(settings, release, root)
    (root / "var/lib/cpuos/config.toml").write_text(config)
    _arrange_services(root, checks)
    for name, wanted in (("kernel", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        (found,) = (root / "boot").glob(wanted)
        shutil.copy(found, folder / name)
    with open(folder / "disk", "wb") as disk:
        disk.truncate(_DISK_BYTES)
    run("mkfs.ext4", "-q", "-F", "-d", root, folder / "disk")
    shutil.rmtree(root)


def boot(folder: Path, *, machine: Sequence[str] = PARALLEL, limit_s: float = 1500) -> dict[str, str]:
    """What each check found wrong, by name; empty: nothing. Returns when the machine is off."""
    serial = folder / "serial"
    argv = ["qemu-system-x86_64", "-M", "pc", *machine, "-m", "4096"]
    argv += ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-device", "virtio-rng-pci"]
    argv += ["-kernel", str(folder / "kernel"), "-initrd", str(folder / "initrd")]
    argv += ["-append", "root=/dev/vda rw console=ttyS0 quiet systemd.unified_cgroup_hierarchy=1"]
    argv += ["-drive", f"file={folder / 'disk'},format=raw,if=virtio,cache=unsafe", "-serial", f"file:{serial}"]
    subprocess.run(argv, check=True, timeout=limit_s, stdin=subprocess.DEVNULL)
    told = serial.read_text(errors="replace")
    assert "checks done" in told, told[-4000:]
    lines = [line[line.index("check {") + 6 :] for line in told.splitlines() if "check {" in line]
    return {one["name"]: one["why"] for one in map(json.loads, lines)}


def _lay_out_source(target: Path) -> None:
    """What git knows of, and what it would take in: as it stands here now."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _install_cpuos(settings: Settings, release: Release, root: Path) -> None:
    """By its own set-up, which finds what needs no distribution built already: gVisor, the agent, uv; of the templates
    the small one, that of an earlier machine or of this one, if it is of that release."""
    data = root / "var/lib/cpuos"
    _copy(settings.data_dir / "bin", data / "bin")
    kept = cache(settings) / f"template-{release.name}"
    for place in (settings.template_dir / "base", kept):
        if place.is_dir():
            _copy(place, data / "templates/base")
    fetched = Path(os.environ.get("UV_CACHE_DIR", settings.cache_dir / "uv-cache"))
    fetched.mkdir(parents=True, exist_ok=True)
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _WORKSHOP, "workshop", root, fetched]
    run(*words)
    if (data / "cache/templates-built").exists():
        _copy(data / "templates/base", kept)
    shutil.rmtree(data / "cache")


def _arrange_services(root: Path, checks: str) -> None:
    for unit in (ROOT / "deploy/systemd").glob("cpuos*"):
        shutil.copy(unit, root / "etc/systemd/system")
        if unit.suffix == ".service":
            _enable(root, unit.name, wanted_by="cpuos.target")
    _enable(root, "cpuos.target", wanted_by="multi-user.target")
    (root / "etc/systemd/system/checks.service").write_text(_CHECKS_UNIT.format(folder=FOLDER, checks=checks))
    _enable(root, "checks.service", wanted_by="multi-user.target")
    (root / "etc/systemd/system/serial-getty@ttyS0.service").symlink_to("/dev/null")
    (root / "etc/hostname").write_text("machine\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost machine\n")


def _enable(root: Path, unit: str, *, wanted_by: str) -> None:
    folder = root / "etc/systemd/system" / f"{wanted_by}.wants"
    folder.mkdir(exist_ok=True)
    (folder / unit).symlink_to(f"/etc/systemd/system/{unit}")


def _copy(place: Path, target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    run("cp", "-dR", "--preserve=mode,timestamps,links", place, target)
