"""A machine of its own for cpuOS: a distribution with its service manager and control groups v2, in QEMU, translated.

It has no network card, so that nothing leaves it. What is installed there comes from this machine's set-up.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

from cpuos.settings import Settings
from cpuos.setup.packages import SYSTEM_PACKAGES

__all__ = ["boot", "build_disk", "missing_programs"]

ROOT = Path(__file__).parents[2]
_RELEASE = "bookworm"
_PACKAGES = ("systemd-sysv", "udev", "kmod", "linux-image-cloud-amd64", "initramfs-tools", "sudo", *SYSTEM_PACKAGES)
_DISK_BYTES = 6 << 30
_BOOT_S = 1500
_USERS = """
groupadd --system cpuos
for user in cpuos-server cpuos-gateway cpuos-network; do
    useradd --system --gid cpuos --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin $user
done
"""
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
ExecStart=/var/lib/cpuos/venv/current/bin/python /opt/guest_checks.py
ExecStopPost=/usr/bin/systemctl poweroff --no-block
"""


def missing_programs() -> list[str]:
    return [name for name in ("qemu-system-x86_64", "mmdebstrap", "mkfs.ext4") if shutil.which(name) is None]


def build_disk(settings: Settings, folder: Path) -> None:
    """`disk`, `kernel` and `initrd` in the folder. The distribution's part is built once and kept in the cache."""
    base = _base(settings)
    root = folder / "root"
    _run("cp", "-a", base, root)
    _install_cpuos(settings, root)
    for unit in (ROOT / "deploy/systemd").glob("cpuos*"):
        shutil.copy(unit, root / "etc/systemd/system")
        if unit.suffix == ".service":
            _enable(root, unit.name, wanted_by="cpuos.target")
    _enable(root, "cpuos.target", wanted_by="multi-user.target")
    (root / "etc/systemd/system/checks.service").write_text(_CHECKS_UNIT)
    _enable(root, "checks.service", wanted_by="multi-user.target")
    (root / "etc/systemd/system/serial-getty@ttyS0.service").symlink_to("/dev/null")
    shutil.copy(Path(__file__).with_name("guest_checks.py"), root / "opt/guest_checks.py")
    (root / "etc/hostname").write_text("machine\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost machine\n")
    for name, wanted in (("kernel", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        (found,) = (root / "boot").glob(wanted)
        shutil.copy(found, folder / name)
    with open(folder / "disk", "wb") as disk:
        disk.truncate(_DISK_BYTES)
    _run("mkfs.ext4", "-q", "-F", "-d", root, folder / "disk")
    shutil.rmtree(root)


def boot(folder: Path) -> dict[str, str]:
    """What each check found wrong, by name; empty: nothing. Returns when the machine is off."""
    serial = folder / "serial"
    argv = ["qemu-system-x86_64", "-M", "pc", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "4096"]
    argv += ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-device", "virtio-rng-pci"]
    argv += ["-kernel", str(folder / "kernel"), "-initrd", str(folder / "initrd")]
    argv += ["-append", "root=/dev/vda rw console=ttyS0 quiet systemd.unified_cgroup_hierarchy=1"]
    argv += ["-drive", f"file={folder / 'disk'},format=raw,if=virtio,cache=unsafe", "-serial", f"file:{serial}"]
    subprocess.run(argv, check=True, timeout=_BOOT_S, stdin=subprocess.DEVNULL)
    told = serial.read_text(errors="replace")
    assert "checks done" in told, told[-4000:]
    lines = [line[line.index("check {") + 6 :] for line in told.splitlines() if "check {" in line]
    return {one["name"]: one["why"] for one in map(json.loads, lines)}


def _base(settings: Settings) -> Path:
    name = hashlib.sha256(" ".join([_RELEASE, *sorted(_PACKAGES), _USERS]).encode()).hexdigest()[:12]
    base = settings.cache_dir / "test-machine" / name
    if not base.exists():
        building = base.with_name(f"{name}.building")
        shutil.rmtree(base.parent, ignore_errors=True)
        base.parent.mkdir(parents=True)
        argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", '--aptopt=Acquire::Retries "5"']
        argv += [f"--include={','.join(_PACKAGES)}", f"--customize-hook=chroot \"$1\" sh -ec '{_USERS}'"]
        _run(*argv, _RELEASE, building)
        building.rename(base)
    return base


def _install_cpuos(settings: Settings, root: Path) -> None:
    """As set-up has installed it here, at the same places; of the templates the small one."""
    places = [settings.data_dir / "bin", settings.template_dir / "base"]
    places += [settings.venv_dir / "current", (settings.venv_dir / "current").resolve()]
    places += settings.venv_dir.glob("dependencies-*")
    for place in places:
        target = root / "var/lib/cpuos" / place.relative_to(settings.data_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        _run("cp", "-a", place, target)


def _enable(root: Path, unit: str, *, wanted_by: str) -> None:
    folder = root / "etc/systemd/system" / f"{wanted_by}.wants"
    folder.mkdir(exist_ok=True)
    (folder / unit).symlink_to(f"/etc/systemd/system/{unit}")


def _run(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words[0]}: {done.stderr[-3000:]}"
